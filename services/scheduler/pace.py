"""The pace of one worker group: when its running batch began, when the next is due, and whose blocks still drain."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.scheduler.core.pacing import StepPredictor
from services.scheduler.core.plan import StepPlan
from services.scheduler.workers import WorkerLink

# A step is slow, and says so in the traces of its requests, when it takes so many times what its class takes, and at least so long.
_SLOW_FACTOR, _SLOW_LEAST_US = 3.0, 100_000
# It counts as hung after so many times, and so long: on shared cores a step was seen to take forty times its usual.
_HUNG_FACTOR, _HUNG_LEAST_US = 100.0, 20_000_000


@dataclass(slots=True)
class Pace:
    """`started_ns`: monotonic start of the running batch; `timer`: for the next plan; `freeing`: (cancel's instant, last batch) pairs."""

    link: WorkerLink
    predictor: StepPredictor = field(default_factory=StepPredictor)
    started_ns: int = 0
    timer: asyncio.TimerHandle | None = None
    freeing: list[tuple[int, int]] = field(default_factory=list)

    def stop_timer(self) -> None:
        """Forgets the moment that was foreseen."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def wait_us(self, head: StepPlan, margin_us: float, now_ns: int, steps: int = 1) -> float | None:
        """Microseconds until the batch behind the running `head` should be sent (negative: it is late); None: not foreseeable.

        `steps`: of the lease that `head` is the first of, it included.
        """
        predicted_us = self.predictor.predict_us(head.tokens, len(head.rows))
        return None if predicted_us is None else steps * predicted_us - margin_us - (now_ns - self.started_ns) / 1000

    def lease_steps(self, rows: int, most: int, due_ns: int | None, now_ns: int) -> int:
        """Steps, at most `most`, that a lease of so many decode rows may have to be over when the next deadline falls due (None: never).

        1, which is no lease, until such a step was seen.
        """
        predicted_us = self.predictor.predict_us(rows, rows)
        if predicted_us is None or due_ns is None:
            return 1 if predicted_us is None else most
        return max(1, min(most, int((due_ns - now_ns) / 1000 / max(1.0, predicted_us))))

    def patience_us(self, head: StepPlan | None, most_us: float) -> float:
        """How long the running `head` may run before the worker counts as hung: many times what its class takes, at most `most_us`."""
        predicted_us = self.predictor.predict_us(head.tokens, len(head.rows)) if head else None
        return most_us if predicted_us is None else min(most_us, max(_HUNG_LEAST_US, _HUNG_FACTOR * predicted_us))

    def observe(self, head: StepPlan, total_us: int) -> bool:
        """Learns from a step that ran; whether it was slow for its class."""
        if not head.rows:
            return False
        predicted_us = self.predictor.predict_us(head.tokens, len(head.rows))
        self.predictor.observe(head.tokens, len(head.rows), total_us)
        return predicted_us is not None and total_us > max(_SLOW_LEAST_US, _SLOW_FACTOR * predicted_us)

    def take_freed(self, batch: int) -> list[int]:
        """Instants of the cancels whose blocks are free now that `batch` is over."""
        freed = [since for since, last in self.freeing if last <= batch]
        self.freeing = [(since, last) for since, last in self.freeing if last > batch]
        return freed
