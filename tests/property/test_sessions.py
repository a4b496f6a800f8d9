"""Gateways' books and the scheduler's engine across lost, late and half-open sessions: each token once, each ending once, all credits back.

Two drivers of the same world (tests/support/session_world.py): hypothesis, which shrinks, and a seeded drive of thousands of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from libs.sampling import SamplingParams
from tests.property.session_drive import drive
from tests.support.model_constraints import multiples
from tests.support.session_world import SessionWorld

GATEWAY = st.integers(0, 1)
SOME = st.integers(0, 5)


class SessionMachine(RuleBasedStateMachine):
    """One world; each rule is one of its events."""

    world: SessionWorld

    @initialize(lease_steps=st.sampled_from([1, 4]))
    def begin(self, lease_steps: int) -> None:
        self.world = SessionWorld(lease_steps=lease_steps)

    @rule(
        gateway=GATEWAY,
        head=st.integers(1, 2),
        length=st.integers(1, 50),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 3),
        deadline=st.none() | st.floats(0.01, 20),
        choices=st.sampled_from([1, 3]),
        constraint=st.none() | st.builds(multiples, st.sampled_from([1, 3]), st.integers(1, 6)),
    )
    def submit(self, gateway: int, head: int, length: int, max_tokens: int, seed: int, **values: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=seed)
        self.world.submit(gateway, [head] * length, params, **values)

    @rule(gateway=GATEWAY)
    def gateway_connects(self, gateway: int) -> None:
        self.world.connect(gateway)

    @rule(gateway=GATEWAY)
    def gateway_writes(self, gateway: int) -> None:
        self.world.write_up(gateway)

    @rule(gateway=GATEWAY, number=SOME)
    def scheduler_reads(self, gateway: int, number: int) -> None:
        self.world.deliver_up(gateway, number)

    @rule(gateway=GATEWAY)
    def scheduler_writes(self, gateway: int) -> None:
        self.world.write_down(gateway)

    @rule(gateway=GATEWAY, number=SOME, twice=st.booleans())
    def gateway_reads(self, gateway: int, number: int, twice: bool) -> None:
        self.world.deliver_down(gateway, number, twice=twice)

    @rule(gateway=GATEWAY)
    def a_frame_is_lost(self, gateway: int) -> None:
        self.world.lose_frame(gateway)

    @rule()
    def worker_reads(self) -> None:
        self.world.take()

    @rule(busy=st.sampled_from([False, False, False, True]))
    def worker_compiles(self, busy: bool) -> None:
        self.world.compile(busy=busy)

    @rule(fail=st.sampled_from([False, False, False, True]))
    def worker_runs(self, fail: bool) -> None:
        self.world.work(fail=fail)

    @rule()
    def answer_arrives(self) -> None:
        self.world.answer()

    @rule()
    def worker_is_lost(self) -> None:
        self.world.lose_worker()

    @rule()
    def worker_attaches(self) -> None:
        self.world.attach()

    @rule(gateway=GATEWAY, number=SOME)
    def client_reads(self, gateway: int, number: int) -> None:
        self.world.read(gateway, number)

    @rule(gateway=GATEWAY, number=SOME)
    def client_leaves(self, gateway: int, number: int) -> None:
        self.world.cancel(gateway, number)

    @rule(gateway=GATEWAY)
    def gateway_loses_its_session(self, gateway: int) -> None:
        self.world.gateway_notices(gateway)

    @rule(gateway=GATEWAY, number=SOME)
    def scheduler_loses_a_session(self, gateway: int, number: int) -> None:
        self.world.scheduler_notices(gateway, number)

    @rule(seconds=st.floats(0.01, 5))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.drain()
            finally:
                self.world.close()


SessionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestSessionsUnderEveryInterleaving = SessionMachine.TestCase


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What a drive of 12,000 events met."""
    return drive(seed=1, events=12_000)


# What the drive must have met, and at least how often; it meets some five times as much.
EVENTS = {
    "submit": 100,
    "answer": 300,
    "asked": 10,
    "compiled": 10,
    "busy": 1,
    "constraint_complete": 5,
    "frame written": 500,
    "frame twice": 5,
    "late frame up": 10,
    "late frame down": 10,
    "lost frame": 1,
    "gateway lost its session": 15,
    "scheduler lost a session": 5,
    "reconnect, the old session open": 10,
    "resubmit": 10,
    "resubmit with output": 3,
    "worker lost": 3,
    "lease": 20,
    "cut": 10,
    "closed": 10,
    "cancel": 20,
    "length": 30,
    "length after a loss": 5,
    "cancelled": 10,
    "deadline": 3,
    "failed": 3,
}


@pytest.mark.parametrize("event", EVENTS)
def test_the_drive_meets_every_kind_of_event(seen: Counter[str], event: str):
    assert seen[event] >= EVENTS[event]


def serve(world: SessionWorld, until: Callable[[], bool], show: Callable[[], bool] = lambda: True) -> None:
    """Everything moves on until something holds; the first gateway is given frames while `show()`."""
    while not until():
        world.write_up(0)
        world.deliver_up(0, 1)
        world.work()
        world.answer()
        world.pass_time(0.01)
        world.write_down(0)
        while (wire := world.gateways[0].wire) is not None and wire.down and show():
            world.deliver_down(0, 1)


@pytest.mark.parametrize("shown", [0, 5, 19])
def test_a_request_whose_ending_is_lost_with_its_session_is_counted_once_and_told_the_same(shown: int):
    """`shown`: tokens of twenty that the gateway has when its session breaks; the rest and the ending are on the way."""
    world = SessionWorld(gateways=1)
    state, side, params = world.engine.state, world.gateways[0], SamplingParams(max_tokens=20, ignore_eos=True)
    assert state is not None
    try:
        world.connect(0)
        world.submit(0, [1] * 40, params, deadline=None)
        serve(world, until=lambda: side.sequences[0].endings == 1)
        world.submit(0, [1] * 40, params, deadline=None)  # it finds the first one's blocks
        second = side.sequences[1]
        serve(world, until=lambda: state.counters.finished == 2, show=lambda: len(second.ticket.output) < shown)
        assert second.endings == 0
        world.gateway_notices(0)
        world.drain()
        assert world.seen["resubmit"] == 1
        assert second.ticket.ending is not None
        assert second.ticket.ending.cached_tokens == 32
        assert (state.counters.prefix_queries, state.counters.prefix_hits) == (80, 32)
    finally:
        world.close()
