"""Prometheus metrics: shared buckets, registries, exemplars, and the endpoint of services that have no HTTP of their own.

Names are `tokenloom:` and the name vLLM's users know. Every metric of a service stands in that service's metrics.py, with a
help text that says what to do about it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.exposition import choose_encoder

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
    """What `registry` holds and its content type, in the format that an Accept header asks for: only OpenMetrics carries exemplars."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def trace_exemplar(trace_id: int, *, recorded: bool) -> dict[str, str] | None:
    """The exemplar that leads from a histogram's bucket to a request's trace; None where nobody records it, for it would lead nowhere."""
    return {"trace_id": f"{trace_id:032x}"} if recorded else None


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `registry` at http://host:port/metrics from a daemon thread. Port 0: does nothing. Raises OSError when the port is taken."""
    if port:
        start_http_server(port, addr=host, registry=registry)
