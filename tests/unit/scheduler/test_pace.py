"""When the next step is due, which step is slow, and which worker hangs."""

from __future__ import annotations

import pytest

from services.scheduler.core.plan import StepPlan
from services.scheduler.pace import Pace
from services.scheduler.workers import WorkerLink
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import planned, submit

MOST_US = 120e6


@pytest.fixture
def pace() -> Pace:
    return Pace(WorkerLink("unix:/nowhere", None))  # type: ignore[arg-type]


@pytest.fixture
def head() -> StepPlan:
    state = make_state()
    group = add_group(state)
    submit(state, [1] * 8)
    return planned(state, group)


def test_what_was_never_seen_is_not_foreseen_and_may_take_its_time(pace: Pace, head: StepPlan):
    assert pace.wait_us(head, 3000, 0) is None
    assert pace.patience_us(head, MOST_US) == pace.patience_us(None, MOST_US) == MOST_US


def test_the_next_step_is_due_a_margin_before_the_running_one_is_predicted_to_end(pace: Pace, head: StepPlan):
    pace.observe(head, 50_000)
    pace.started_ns = 1_000_000_000
    assert pace.wait_us(head, 3000, 1_000_000_000) == 47_000
    assert pace.wait_us(head, 3000, 1_060_000_000) == -13_000


@pytest.mark.parametrize(("usual_us", "limit_us"), [(1_000, 20e6), (25_000, 20e6), (500_000, 50e6), (30_000_000, MOST_US)])
def test_a_step_hangs_after_a_hundred_times_its_usual_within_bounds(pace: Pace, head: StepPlan, usual_us: int, limit_us: float):
    pace.observe(head, usual_us)
    assert pace.patience_us(head, MOST_US) == limit_us


def test_a_step_is_slow_when_it_takes_three_times_its_usual_and_a_tenth_of_a_second(pace: Pace, head: StepPlan):
    assert not pace.observe(head, 20_000), "the first of its class"
    assert not pace.observe(head, 90_000), "too short to be called slow"
    assert pace.observe(head, 1_000_000)


def test_a_batch_that_only_closes_slots_teaches_nothing(pace: Pace, head: StepPlan):
    head.rows.clear()
    assert not pace.observe(head, 10)
    assert pace.wait_us(head, 3000, 0) is None


def test_cancels_are_settled_by_the_batch_that_their_blocks_waited_for(pace: Pace):
    pace.freeing = [(10, 4), (20, 5), (30, 7)]
    assert pace.take_freed(5) == [10, 20]
    assert pace.freeing == [(30, 7)]


def test_behind_a_closed_lease_the_next_batch_is_due_when_all_its_steps_are_predicted_to_end(pace: Pace, head: StepPlan):
    pace.observe(head, 50_000)
    pace.started_ns = 1_000_000_000
    assert pace.wait_us(head, 3000, 1_000_000_000, steps=3) == 147_000


@pytest.mark.parametrize(
    ("seen_us", "due_ns", "steps"),
    [
        (None, None, 1),
        (None, 10**12, 1),
        (10_000, None, 8),
        (10_000, 10**9, 8),
        (10_000, 35_000_000, 3),
        (10_000, 5_000_000, 1),
        (10_000, -5, 1),
    ],
)
def test_a_lease_is_over_before_the_next_deadline_and_is_none_while_nothing_is_foreseen(
    pace: Pace, seen_us: int | None, due_ns: int | None, steps: int
):
    if seen_us is not None:
        pace.predictor.observe(4, 4, seen_us)
    assert pace.lease_steps(4, 8, due_ns, 0) == steps
