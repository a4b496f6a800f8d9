"""TCP ports of one machine: whether one is free, and free ones near a wished number."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens on (host, port) now.

    Raises OSError when this process could not listen there either way: a host that does not resolve (socket.gaierror) or is not this
    machine's, a port that needs privileges.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def choose(host: str, wished: int, taken: Collection[int] = ()) -> int:
    """`wished` if it is free, allowed and not in `taken`, else a free port that the kernel picks. Raises OSError as is_free for a host."""
    with contextlib.suppress(PermissionError):
        if 0 < wished <= 65535 and wished not in taken and is_free(host, wished):
            return wished
    while True:
        family = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def reachable_host(host: str) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`, as it stands in a URL."""
    known = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return known.get(host, f"[{host}]" if ":" in host else host)
