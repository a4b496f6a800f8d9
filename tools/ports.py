"""Ports for servers that tests and tools start.

A port that the kernel gives to a probe (bind to 0) may be given to somebody's outgoing connection before the server binds it.
So ports are taken below the range of outgoing connections (32768 upwards on Linux), and no process hands one out twice.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 20_000, 12_000
# A stride of its own per process, so that two test runs on one machine seldom meet; whether a port is free is asked anyway.
_offers = itertools.count(os.getpid() * 769)


def free_port() -> int:
    """A TCP port that nobody listens on, given to no other caller in this process. Raises OSError when all are taken."""
    for _ in range(COUNT):
        port = FIRST + next(_offers) % COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {FIRST}-{FIRST + COUNT - 1}")
