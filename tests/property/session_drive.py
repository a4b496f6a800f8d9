"""Thousands of random events between gateways' books and the scheduler's engine, from one seed.

`python -m tests.property.session_drive --events 20000 --seed 1` prints what happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial

from libs.sampling import SamplingParams
from libs.telemetry import logs
from tests.property import driving
from tests.support.model_constraints import multiples
from tests.support.session_world import SessionWorld


class Episode:
    """One world and its events. As in core_drive, each episode leaves some kinds out and prefers others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.world = SessionWorld(gateways=rng.choice([1, 2]), lease_steps=rng.choice([1, 1, 4, 8]))
        self._events: list[Callable[[], None]] = []
        self._weights: list[float] = []
        for event, weight, optional in self._kinds():
            self._events.append(event)
            self._weights.append(weight * (rng.choice([0, 0.3, 1, 3]) if optional else rng.choice([0.5, 1, 2])))

    def _kinds(self) -> list[tuple[Callable[[], None], float, bool]]:
        world, pick, rng = self.world, self._pick, self._rng
        return [
            (self._submit, 5, False),
            (lambda: world.connect(pick()), 6, False),
            (lambda: world.write_up(pick()), 12, False),
            (lambda: world.deliver_up(pick(), pick()), 12, False),
            (lambda: world.write_down(pick()), 14, False),
            (lambda: world.deliver_down(pick(), pick()), 14, False),
            (lambda: world.deliver_down(pick(), pick(), twice=True), 2, True),
            (lambda: world.lose_frame(pick()), 0.5, True),
            (world.take, 8, False),
            (world.compile, 6, False),
            (lambda: world.compile(busy=True), 1.5, True),
            (world.work, 14, False),
            (lambda: world.work(fail=True), 0.2, True),
            (world.answer, 14, False),
            (lambda: world.read(pick(), pick()), 4, False),
            (lambda: world.cancel(pick(), pick()), 2, True),
            (lambda: world.gateway_notices(pick()), 0.8, True),
            (lambda: world.scheduler_notices(pick(), pick()), 0.8, True),
            (world.lose_worker, 0.5, True),
            (world.attach, 3, False),
            (lambda: world.pass_time(rng.choice([0.01, 0.3, 0.5, 5])), 5, False),
        ]

    def _pick(self) -> int:
        return self._rng.randrange(1000)

    def _submit(self) -> None:
        rng = self._rng
        prompt = [rng.randint(1, 2)] * rng.choice([1, 15, 16, 17, 33, 48])
        params = SamplingParams(max_tokens=rng.choice([1, 4, 20, 40]), seed=rng.randrange(3), stop=rng.choice([(), (), ("a",)]))
        deadline = rng.choice([0.05, 1.0, 20.0]) if rng.random() < 0.2 else None
        constraint = multiples(rng.choice([1, 3]), rng.choice([1, 6])) if rng.random() < 0.3 else None
        self.world.submit(self._pick(), prompt, params, deadline=deadline, choices=rng.choice([1, 1, 3]), constraint=constraint)

    def run(self, events: int) -> None:
        """So many events, then peace until everybody is served."""
        try:
            for event in self._rng.choices(self._events, self._weights, k=events):
                event()
            self.world.drain()
        finally:
            self.world.close()


drive = partial(driving.drive, Episode)

if __name__ == "__main__":
    logs.configure("session-drive", "", level="error")
    sys.exit(driving.main(Episode, __doc__))
