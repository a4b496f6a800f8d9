"""Prometheus metrics: shared buckets, registries, exemplars, and the endpoint of services that have no HTTP of their own.

Names are `tokenloom:` and the name vLLM's users know. Every metric of a service stands in that service's metrics.py, with a
help text that says what to do about it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.openmetrics import exposition as openmetrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

# Seconds. From one CPU decode step to a long generation; the same for TTFT, queue and end-to-end, so that stages can be compared.
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Seconds. Steps and parts of steps.
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Tokens.
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


def new_registry() -> CollectorRegistry:
    """A registry of one service's own, with CPU, memory and open files of its process (`process_*`). Child processes are not in them."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What `registry` holds and its content type, in the format that an Accept header asks for: only OpenMetrics carries exemplars.

    Both formats use the very same names. prometheus_client's own negotiation does not (0.26, its issue 1177): as OpenMetrics it writes
    the colon of `tokenloom:...` as an underscore in samples, though not in their TYPE lines. Told not to escape, it leaves them alone.
    """
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def trace_exemplar(trace_id: int, *, recorded: bool) -> dict[str, str] | None:
    """The exemplar that leads from a histogram's bucket to a request's trace; None where nobody records it, for it would lead nowhere."""
    return {"trace_id": f"{trace_id:032x}"} if recorded else None


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a line for each scrape is no news."""


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `registry` at http://host:port/metrics from a daemon thread. Port 0: does nothing. Raises OSError when the port is taken."""
    if not port:
        return

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body, content_type = exposition(registry, environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]

    server = make_server(host, port, application, Server, handler_class=_SilentHandler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
