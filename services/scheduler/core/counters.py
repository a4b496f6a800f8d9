"""What the core counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Conservation: admitted = finished + failed + cancelled + live, where live = len(SchedulerState.requests)."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    preemptions: int = 0
    resumed: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    sibling_shared: int = 0
    stale_results: int = 0
    unknown_cancels: int = 0
    steps: int = 0
    mixed_steps: int = 0
    leases: int = 0
    cut_leases: int = 0
    stale_closed: int = 0
    stale_prepared: int = 0
    unanswered_prepares: int = 0
