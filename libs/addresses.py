"""The address under which others reach a service that listens on one of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

# What a server listens on that takes connections on every interface: an address for binding, not for dialling.
_EVERYWHERE = frozenset({"", "0.0.0.0", "[::]"})
# Any address beyond the machine's own networks (reserved for documentation): which interface leads there is asked, nothing is sent.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


async def advertised(bound: str, given: str = "", *, towards: str = "") -> str:
    """What to tell others: `given` (with the port of `bound` if it has none), or derived from `bound` where that is empty.

    A Unix socket and a concrete host stay as they are. Of a service on every interface it is the address by which this host reaches
    `towards` (a host; the store's: whoever reads the address reaches the store too), else the one that its default route leaves by, else
    its name.
    """
    if bound.startswith("unix:"):
        return given or bound
    host, _, port = bound.rpartition(":")
    if given:
        return given if _has_port(given) else f"{_bracketed(given)}:{port}"
    return bound if host not in _EVERYWHERE else f"{_bracketed(await _own_address(towards))}:{port}"


def _has_port(address: str) -> bool:
    """Whether `address` is more than a host; an IPv6 address without brackets is a host."""
    if address.startswith("unix:"):
        return True
    return address.rpartition("]")[2].count(":") == 1 if not _is_ip(address) else False


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def _own_address(towards: str) -> str:
    if towards:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        except OSError:  # its name is not known yet
            found = []
        for family, _, _, _, where in found:
            own = _leaving_by(family, where)
            if own and not ipaddress.ip_address(own).is_loopback:
                return own
    for kind, elsewhere in _ELSEWHERE:
        own = _leaving_by(kind, (elsewhere, 9))
        if own:
            return own
    return socket.gethostname()


def _leaving_by(family: int, where: tuple[object, ...]) -> str:
    """This host's address on the way to `where`; empty: there is no way. Connecting a datagram socket sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
