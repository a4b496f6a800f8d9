"""The scheduler's core under every interleaving that PROTOCOL.md names, against workers that model block contents.

Two drivers choose the events of the same small world (tests/support/core_world.py), which checks everything after each: hypothesis, which
shrinks what it finds to a few events, and a seeded drive of thousands of events, which must have met every kind of event.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from libs.errors import ErrorCode
from libs.sampling import SamplingParams
from services.scheduler.core.request import CancelReason, WaitReason
from services.scheduler.core.stopping import FinishReason
from tests.property.core_drive import drive
from tests.support.core_check_world import REFUSALS, CheckWorld
from tests.support.core_shapes import MAX_MODEL_LEN, OUT_OF_MEMORY, Shape, block_edge_prompt
from tests.support.model_constraints import multiples
from tokenloom.worker.v1 import worker_pb2

SOME = st.integers(0, 5)
ROW_OUTCOMES = [value for value in worker_pb2.RowOutcome.values() if value not in (worker_pb2.ROW_OUTCOME_UNSPECIFIED, 1)]


class CoreMachine(RuleBasedStateMachine):
    """One world; each rule is one of its events."""

    world: CheckWorld

    @initialize(
        groups=st.integers(1, 2),
        blocks=st.lists(st.integers(6, 20), min_size=1, max_size=2),
        slots=st.integers(1, 6),
        budget=st.integers(1, 48) | st.just(128),
        in_flight=st.integers(1, 3),
        distance=st.integers(1, 2),
        caching=st.booleans(),
        chunked=st.booleans(),
        most_live=st.sampled_from([4, 24]),
        most_live_tokens=st.sampled_from([0, 300]),
        policy=st.sampled_from(["fcfs", "priority"]),
        lease_steps=st.sampled_from([1, 3, 8]),
        most_idle=st.sampled_from([0, 1, 256]),
        enough=st.sampled_from([0, 1, 20]),
    )
    def begin(self, blocks: list[int], slots: int, **sizes: Any) -> None:
        self.world = CheckWorld(Shape(blocks=tuple(blocks), slots=slots, sequences=slots, **sizes))

    @rule(
        head=st.integers(1, 3),
        length=st.integers(1, MAX_MODEL_LEN) | st.sampled_from([15, 16, 17, 31, 32, 33, 48]),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 10),
        stop=st.lists(st.sampled_from(["a", "bc", "zz"]), max_size=2),
        seed=st.integers(0, 3),
        gateway=st.integers(0, 1),
        deadline=st.none() | st.integers(1, 60),
        salt=st.sampled_from([b"", b"tenant"]),
        cacheable=st.booleans(),
        resumed=st.integers(0, 20),
        priority=st.integers(-1, 1),
        choices=st.sampled_from([1, 1, 3]),
        poison=st.sampled_from([False, False, False, True]),
        logprobs=st.sampled_from([None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        constraint=st.none() | st.builds(multiples, st.sampled_from([1, 3]), st.integers(1, 20), begin_after=st.sampled_from([(), (5,)])),
    )
    def submit(self, head: int, length: int, max_tokens: int, min_tokens: int, stop: list[str], **values: Any) -> None:
        of_params = {name: values.pop(name) for name in ("seed", "logprobs", "prompt_logprobs")}
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=tuple(stop), **of_params)
        self.world.submit(block_edge_prompt(head, length), params, **values)

    @rule(number=SOME)
    def dispatch(self, number: int) -> None:
        self.world.dispatch(number)

    @rule(number=SOME)
    def worker_runs(self, number: int) -> None:
        self.world.run(number)

    @rule(number=SOME, out_of_memory=st.booleans())
    def worker_fails(self, number: int, out_of_memory: bool) -> None:
        self.world.run(number, fail=True, error=OUT_OF_MEMORY if out_of_memory else None)

    @rule(number=SOME)
    def worker_refuses(self, number: int) -> None:
        self.world.run(number, refuse=True)

    @rule(number=SOME)
    def answer_is_garbled(self, number: int) -> None:
        self.world.run(number, garble=True)

    @rule(number=SOME)
    def answer_has_a_token_too_many(self, number: int) -> None:
        self.world.run(number, overdo=True)

    @rule(number=SOME, row=SOME, outcome=st.sampled_from(ROW_OUTCOMES))
    def a_row_fails(self, number: int, row: int, outcome: int) -> None:
        self.world.run(number, row=row, outcome=outcome)

    @rule(number=SOME)
    def answer_arrives(self, number: int) -> None:
        self.world.hear(number)

    @rule(number=st.integers(0, 99))
    def old_answer_arrives_again(self, number: int) -> None:
        self.world.hear_old(number)

    @rule(number=SOME)
    def answers_arrive_out_of_order(self, number: int) -> None:
        self.world.hear_early(number)

    @rule(number=SOME, crashed=st.booleans())
    def stream_is_lost(self, number: int, crashed: bool) -> None:
        self.world.lose(number, crashed=crashed)

    @rule()
    def worker_attaches(self) -> None:
        self.world.attach()

    @rule(
        number=st.integers(0, 19), reason=st.sampled_from([CancelReason.CLIENT_DISCONNECTED, CancelReason.TIMEOUT]), running=st.booleans()
    )
    def cancel(self, number: int, reason: CancelReason, running: bool) -> None:
        self.world.cancel(number, reason, running=running)

    @rule(gateway=st.integers(0, 1), unread=st.integers(0, 5))
    def session_is_lost(self, gateway: int, unread: int) -> None:
        self.world.lose_session(gateway, unread)

    @rule(number=SOME)
    def gateway_hands_over_again(self, number: int) -> None:
        self.world.resubmit(number)

    @rule(step=st.integers(1, 20))
    def time_passes(self, step: int) -> None:
        self.world.pass_time(step)

    @rule(number=SOME)
    def a_step_begins(self, number: int) -> None:
        self.world.begin(number)

    @rule(number=SOME, wanted=st.booleans())
    def a_lease_is_cut(self, number: int, wanted: bool) -> None:
        (self.world.cut_if_wanted if wanted else self.world.cut)(number)

    @rule(number=SOME)
    def a_cut_arrives(self, number: int) -> None:
        self.world.cut_arrives(number)

    @rule(number=SOME)
    def a_cut_is_ignored(self, number: int) -> None:
        self.world.lose_cut(number)

    @rule(number=SOME)
    def the_answer_to_a_cut_is_overtaken(self, number: int) -> None:
        self.world.delay_closed(number)

    @rule(number=SOME)
    def an_old_answer_to_a_cut_arrives_again(self, number: int) -> None:
        self.world.closed_again(number)

    @rule(number=SOME)
    def a_lease_is_closed_that_nobody_cut(self, number: int) -> None:
        self.world.closed_unasked(number)

    @rule(number=SOME)
    def a_group_is_told_of_constraints(self, number: int) -> None:
        self.world.order(number)

    @rule(number=SOME, place=SOME, code=st.none() | st.sampled_from(REFUSALS))
    def a_constraint_is_compiled(self, number: int, place: int, code: ErrorCode | None) -> None:
        self.world.compile(number, place, code)

    @rule(number=SOME)
    def a_constraint_is_never_answered(self, number: int) -> None:
        self.world.swallow(number)

    @rule(number=SOME)
    def a_verdict_arrives(self, number: int) -> None:
        self.world.hear_verdict(number)

    @rule(number=st.integers(0, 99))
    def an_old_verdict_arrives_again(self, number: int) -> None:
        self.world.hear_old_verdict(number)

    @rule(all_patience=st.booleans())
    def groups_owe_answers_for_long(self, all_patience: bool) -> None:
        (self.world.lose_patience if all_patience else self.world.retry)()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


CoreMachine.TestCase.settings = settings(
    max_examples=200,
    phases=list(Phase),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreUnderEveryInterleaving = CoreMachine.TestCase


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What a drive of 60,000 events met."""
    return drive(seed=1, events=60_000)


# What the drive must have met, and at least how often: a drive that met none of it would prove nothing about it. It meets some five
# times as much, so that a change of the core that shifts what happens when does not fail here.
EVENTS = {
    "submit": 500,
    "submit of a child": 100,
    "dispatch": 5000,
    "hear": 5000,
    "ahead 1": 300,
    "ahead 2": 30,
    "chunk": 500,
    "mixed": 100,
    "hit": 50,
    "hit of a sibling": 30,
    "hit of output": 3,
    "shared": 100,
    "pending": 500,
    "draining": 500,
    "preempted": 10,
    "broken": 50,
    "stale": 100,
    "stale epoch, right number": 10,
    "reordered": 3,
    "garbled": 3,
    "out of memory": 3,
    "batch BATCH_OUTCOME_FAILED": 10,
    "batch BATCH_OUTCOME_NOT_RUN": 10,
    "lost in peace": 10,
    "lost, crashed": 10,
    "attach": 30,
    "lease": 200,
    "cut": 15,
    "cut that was wanted": 5,
    "cut after the lease's end": 3,
    "cut ignored": 1,
    "closed": 8,
    "closed after its last result": 4,
    "closed overtaken": 1,
    "closed in vain": 10,
    "closed unasked": 2,
    "late closed": 3,
    "failed within a lease": 1,
    "lost within a lease": 3,
    "cancel within a lease": 10,
    "stop within a lease": 4,
    "logprobs": 500,
    "prompt told": 50,
    "prompt told in pieces": 50,
    "session lost": 10,
    "resubmit": 30,
    "cancel": 50,
    "cancel of nobody": 10,
    "deadline": 3,
    "refused QUEUE_FULL": 20,
    "refused PROMPT_TOO_LONG": 3,
    "refused CANNOT_FIT": 3,
    "ending CANNOT_FIT": 3,
    "ending POISON_REQUEST": 2,
    "ending PROTOCOL_VIOLATION": 3,
    "asked": 60,
    "compiled": 40,
    "compile error INVALID_CONSTRAINT": 2,
    "compile error CONSTRAINT_BUSY": 2,
    "compile error INTERNAL": 2,
    "never answered": 3,
    "patience lost": 8,
    "busy, asked again": 1,
    "forgotten": 20,
    "stale verdict": 10,
    "ready here, not there": 100,
    "checked again after a loss": 1,
    "ending INVALID_CONSTRAINT": 1,
    "ending CONSTRAINT_BUSY": 2,
}


@pytest.mark.parametrize("event", EVENTS)
def test_the_drive_meets_every_kind_of_event(seen: Counter[str], event: str):
    assert seen[event] >= EVENTS[event]


@pytest.mark.parametrize("reason", WaitReason)
def test_the_drive_meets_every_reason_to_wait(seen: Counter[str], reason: WaitReason):
    assert seen[f"wait {reason.name}"] > 0


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.FAILED])
def test_the_drive_meets_every_ending(seen: Counter[str], reason: FinishReason):
    assert seen[f"ending {reason.name}"] > 0


@pytest.mark.parametrize("error", ["DEAD_END", "NON_FINITE", "STEP_FAILED"])
def test_the_drive_meets_every_failure_of_a_row(seen: Counter[str], error: str):
    assert seen[f"ending {error}"] > 0
