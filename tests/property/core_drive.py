"""Thousands of random events against the scheduler's core, from one seed: the same property as the hypothesis machine, longer and faster.

`python -m tests.property.core_drive --events 20000 --seed 1` prints what happened. Each episode is a small world of its own shape, and
draws how often each kind of event comes, with some left out ("swarm testing", Groce et al. 2012): a bug that needs many preemptions and
no cancel is not hidden by the average.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial

from libs.constraints import Constraint
from libs.sampling import SamplingParams
from services.scheduler.core.request import CancelReason
from tests.property import driving
from tests.support.core_check_world import REFUSALS, CheckWorld
from tests.support.core_shapes import OUT_OF_MEMORY, Shape, block_edge_prompt
from tests.support.model_constraints import multiples
from tokenloom.worker.v1 import worker_pb2

# Lengths of prompts around the edges of blocks; episodes of short ones have many requests that grow beside each other.
_SHORT = [1, 2, 15, 16, 17, 18, 31, 32, 33]
_LONG = [*_SHORT, 47, 48, 49, 64, 65, 80, 95, 96]
_ROWS = [
    worker_pb2.ROW_OUTCOME_FAILED,
    worker_pb2.ROW_OUTCOME_NON_FINITE,
    worker_pb2.ROW_OUTCOME_NOT_RUN,
    worker_pb2.ROW_OUTCOME_DEAD_END,
    worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE,
    worker_pb2.ROW_OUTCOME_REFUSED_ARGS,
]
_REASONS = [CancelReason.CLIENT_DISCONNECTED, CancelReason.TIMEOUT, CancelReason.SLOW_READER, CancelReason.SIBLING_FAILED]


def draw_shape(rng: random.Random) -> Shape:
    """A small world; every switch in either position, sizes at which everything is scarce."""
    return Shape(
        groups=rng.choice([1, 1, 1, 2, 3]),
        blocks=tuple(rng.choice([3, 6, 6, 7, 8, 9, 10, 16]) for _ in range(3)),
        slots=rng.choice([1, 3, 6, 6]),
        sequences=rng.choice([1, 3, 6, 6]),
        budget=rng.choice([3, 17, 33, 48, 128, 128]),
        in_flight=rng.choice([1, 2, 3, 3]),
        distance=rng.choice([1, 1, 1, 2, 3]),
        caching=rng.random() < 0.8,
        chunked=rng.random() < 0.8,
        most_live=rng.choice([4, 12, 24]),
        most_live_tokens=rng.choice([0, 0, 400]),
        policy=rng.choice(["fcfs", "priority"]),
        lease_steps=rng.choice([1, 2, 4, 8, 30]),
        most_idle=rng.choice([0, 1, 256]),
    )


class Episode:
    """One world and its events."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.world = CheckWorld(draw_shape(rng))
        self._constrained = rng.choice([0, 0, 0.3, 0.7])
        self._poison = rng.choice([0, 0, 0, 0.03])
        self._lengths, self._heads = rng.choice([_SHORT, _SHORT, _LONG]), rng.choice([1, 3])
        self._events: list[Callable[[], None]] = []
        self._weights: list[float] = []
        for event, weight, optional in self._kinds():
            self._events.append(event)
            self._weights.append(weight * (rng.choice([0, 0, 0.3, 1, 3]) if optional else rng.choice([0.5, 1, 2])))

    def _kinds(self) -> list[tuple[Callable[[], None], float, bool]]:
        world, pick, rng = self.world, self._pick, self._rng
        return [
            (self._submit, 6, False),
            (lambda: world.dispatch(pick()), 40, False),
            (lambda: world.run(pick()), 20, False),
            (lambda: world.hear(pick()), 20, False),
            (lambda: world.hear_old(pick()), 3, True),
            (lambda: world.hear_early(pick()), 2, True),
            (lambda: world.run(pick(), fail=True), 0.4, True),
            (lambda: world.run(pick(), fail=True, error=OUT_OF_MEMORY), 0.4, True),
            (lambda: world.run(pick(), refuse=True), 0.4, True),
            (lambda: world.run(pick(), garble=True), 0.2, True),
            (lambda: world.run(pick(), overdo=True), 0.2, True),
            (lambda: world.run(pick(), row=pick(), outcome=rng.choice(_ROWS)), 2, True),
            (lambda: world.lose(pick(), crashed=rng.random() < 0.5), 0.4, True),
            (world.attach, 6, False),
            (lambda: world.cancel(pick(), rng.choice(_REASONS)), 3, True),
            (lambda: world.cancel(pick(), rng.choice(_REASONS), running=True), 2, True),
            (lambda: world.lose_session(pick(), rng.choice([0, 0, 1, 5])), 0.4, True),
            (lambda: world.resubmit(pick()), 4, False),
            (lambda: world.pass_time(rng.randint(1, 20)), 2, True),
            (lambda: world.begin(pick()), 8, True),
            (lambda: world.cut(pick()), 12, True),
            (lambda: world.cut_if_wanted(pick()), 12, True),
            (lambda: world.cut_arrives(pick()), 12, False),
            (lambda: world.lose_cut(pick()), 2, True),
            (lambda: world.delay_closed(pick()), 8, True),
            (lambda: world.closed_again(pick()), 2, True),
            (lambda: world.closed_unasked(pick()), 1, True),
            *(self._kinds_of_constraints() if self._constrained else ()),
        ]

    def _kinds_of_constraints(self) -> list[tuple[Callable[[], None], float, bool]]:
        world, pick, rng = self.world, self._pick, self._rng
        return [
            (lambda: world.order(pick()), 24, False),
            (lambda: world.compile(pick(), pick()), 24, False),
            (lambda: world.compile(pick(), pick(), rng.choice(REFUSALS)), 4, True),
            (lambda: world.swallow(pick()), 1, True),
            (lambda: world.hear_verdict(pick()), 24, False),
            (lambda: world.hear_old_verdict(pick()), 1, True),
            (world.lose_patience, 0.3, True),
            (world.retry, 3, True),
        ]

    def _pick(self) -> int:
        return self._rng.randrange(1000)

    def _submit(self) -> None:
        rng = self._rng
        max_tokens = rng.choice([1, 2, 17, 40, 40])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, rng.choice([0, 0, 3, 40])),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.8,
            stop=tuple(rng.choice([(), (), (), (), ("a",), ("bc", "zz")])),
            logprobs=rng.choice([None, None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, None, 1]),
        )
        self.world.submit(
            block_edge_prompt(rng.randint(1, self._heads), rng.choice(self._lengths)),
            params,
            gateway=rng.randrange(2),
            deadline=rng.randint(1, 200) if rng.random() < 0.2 else None,
            salt=rng.choice([b"", b"", b"", b"tenant"]),
            cacheable=rng.random() < 0.9,
            resumed=rng.choice([0, 0, 0, 2, 20]),
            priority=rng.randint(-1, 2),
            choices=rng.choice([1, 1, 1, 1, 3]),
            poison=rng.random() < self._poison,
            constraint=self._constraint(),
        )

    def _constraint(self) -> Constraint | None:
        rng = self._rng
        if rng.random() >= self._constrained:
            return None
        begin_after = rng.choice([(), (), (), (rng.randrange(1, 40),)])
        return multiples(
            rng.choice([1, 3, 7]), rng.choice([1, 4, 18]), begin_after=begin_after, param=rng.choice(["guided_regex", "regex"])
        )

    def run(self, events: int) -> None:
        """So many events, then peace until everybody is served."""
        for event in self._rng.choices(self._events, self._weights, k=events):
            event()
        self.world.drain()


drive = partial(driving.drive, Episode)

if __name__ == "__main__":
    sys.exit(driving.main(Episode, __doc__))
