"""The periodic log line of statistics, silent while nothing happens."""

from __future__ import annotations

import time
from dataclasses import astuple

from libs.telemetry.logs import get_logger
from services.scheduler.core.state import SchedulerState

log = get_logger(__name__)


class StatsLine:
    """Logs what the scheduler did since the last line, every `interval` seconds in which it did anything."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._due = time.monotonic() + interval
        self._last: tuple[int, ...] = ()
        self._steps = 0

    def tick(self, state: SchedulerState | None) -> None:
        """Logs if it is time and something has changed."""
        if state is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._interval
        counters = astuple(state.counters)
        if counters == self._last and not state.requests:
            return
        steps = state.counters.steps - self._steps
        self._last, self._steps = counters, state.counters.steps
        total = sum(group.ledger.num_blocks for group in state.groups.values())
        held = sum(group.ledger.in_use for group in state.groups.values())
        queries, hits = state.counters.prefix_queries, state.counters.prefix_hits
        log.info(
            "stats",
            running=state.running,
            waiting=len(state.queue) + len(state.checking),
            kv_usage=round(held / total, 3) if total else 0.0,
            steps_per_s=round(steps / self._interval, 1),
            finished=state.counters.finished,
            cancelled=state.counters.cancelled,
            failed=state.counters.failed,
            preemptions=state.counters.preemptions,
            prefix_hit_rate=round(hits / queries, 3) if queries else 0.0,
        )
