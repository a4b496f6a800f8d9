"""Prometheus metrics: shared buckets and the endpoint of services that have no HTTP of their own.

Names are `tokenloom:` and the name vLLM's users know. Every metric of a service stands in that service's metrics.py, with a
help text that says what to do about it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

# Seconds. From one CPU decode step to a long generation; the same for TTFT, queue and end-to-end, so that stages can be compared.
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Seconds. Steps and parts of steps.
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Tokens.
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `registry` at http://host:port/metrics from a daemon thread. Port 0: does nothing. Raises OSError when the port is taken."""
    if port:
        start_http_server(port, addr=host, registry=registry)
