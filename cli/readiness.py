"""Asks the gateway whether the mesh can serve, without a client library: this runs while everything else is loading."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """An answer of /ready; `reason` says what is missing ("" when nothing is)."""

    ready: bool
    reason: str = ""


def probe(host: str, port: int, timeout_seconds: float = _PROBE_SECONDS) -> Readiness:
    """One GET /ready. A gateway that does not answer is not ready."""
    # http.client and not urllib: a proxy of the environment must not be asked for a loopback address.
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        body = response.read(65536)
        return Readiness(True) if response.status == 200 else Readiness(False, _reason(body))
    except (OSError, http.client.HTTPException):
        return Readiness(False, "the gateway is starting")
    finally:
        connection.close()


def _reason(body: bytes) -> str:
    """The messages of the gateway's `reasons` in one line."""
    try:
        return "; ".join(str(reason["message"]).partition(": failed to connect")[0] for reason in json.loads(body)["reasons"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


async def wait_until_ready(host: str, port: int, on_reason: Callable[[str], None]) -> None:
    """Returns once /ready answers 200; tells `on_reason` each time that what is missing changes.

    Without a bound of its own, for a large model loads as long as it loads: the caller ends it when a service fails or the user does.
    """
    last = ""
    while not (state := await asyncio.to_thread(probe, host, port)).ready:
        if state.reason != last:
            last = state.reason
            on_reason(last)
        await asyncio.sleep(_POLL_SECONDS)
