"""What a service counts of its store; each service with a store has these in its registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from libs.store.base import OPERATIONS
from libs.telemetry.metrics import STEP_BUCKETS


class StoreMetrics:
    """A StoreObserver that counts into `registry`. All series exist from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "tokenloom:store_call_seconds",
            "Calls of the shared store. Over 0.01 s: Redis is far, busy or swapping; quotas wait for it.",
            ["operation"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._failures = Counter(
            "tokenloom:store_failures",
            "Calls of the shared store that failed. Rising: it is away; serving goes on, look at the store and at the log.",
            ["operation"],
            registry=registry,
        )
        for operation in OPERATIONS:
            self._seconds.labels(operation)
            self._failures.labels(operation)

    def called(self, operation: str, seconds: float, *, failed: bool) -> None:
        """See StoreObserver."""
        self._seconds.labels(operation).observe(seconds)
        if failed:
            self._failures.labels(operation).inc()
