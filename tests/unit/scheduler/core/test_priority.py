"""The priority policy: who is admitted first, whose rows come first, who is preempted, and that everybody's turn comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.apply import apply
from services.scheduler.core.group import Group
from services.scheduler.core.planner import plan
from services.scheduler.core.queue import Policy, WaitingQueue
from services.scheduler.core.request import Request, RequestState, WaitReason
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_request, make_state
from tests.unit.scheduler.core.outcomes import ok, planned, step, submit


def running(state: SchedulerState, group: Group, prompt: list[int], **fields: object) -> Request:
    request = submit(state, prompt, **fields)  # type: ignore[arg-type]
    while not request.output_ids:
        step(state, group)
    return request


def rows(state: SchedulerState, group: Group) -> list[Request]:
    return [row.request for row in planned(state, group).rows]


@given(st.lists(st.integers(-3, 3), max_size=20))
def test_the_queue_is_ordered_by_priority_then_arrival(priorities: list[int]):
    state, queue = make_state(), WaitingQueue(Policy.PRIORITY)
    for priority in priorities:
        queue.push(make_request(state, [1], priority=priority))
    got = [queue.pop() for _ in priorities]
    assert [(request.priority, request.arrival) for request in got] == sorted((p, n) for n, p in enumerate(priorities, 1))


def test_the_most_urgent_is_admitted_first_and_gets_its_rows_first():
    state = make_state(Policy.PRIORITY)
    group = add_group(state)
    late = running(state, group, [1])
    ordinary, urgent = submit(state, [2], priority=0), submit(state, [3], priority=-5)
    assert rows(state, group) == [late, urgent, ordinary]
    state = make_state(Policy.PRIORITY, max_tokens_per_step=2)
    group = add_group(state)
    slack = running(state, group, [1], priority=1)
    urgent = running(state, group, [2], priority=0)
    assert group.running == [urgent, slack]
    assert rows(state, group) == [urgent, slack]


def test_without_the_policy_a_priority_changes_nothing():
    state = make_state()
    group = add_group(state)
    first = running(state, group, [1], priority=7)
    second = running(state, group, [2], priority=-7)
    assert group.running == [first, second]


def test_a_request_that_waits_for_room_evicts_nobody():
    state = make_state(Policy.PRIORITY)
    group = add_group(state, slots=1)
    running(state, group, [1], priority=9)
    urgent = submit(state, [2], priority=-9)
    planned(state, group)
    assert urgent.wait_reason is WaitReason.NO_SLOT
    assert state.counters.preemptions == 0


@pytest.mark.composes("priority", "preemption")
def test_the_victim_is_the_least_urgent_even_when_it_was_there_first():
    state = make_state(Policy.PRIORITY)
    group = add_group(state, blocks=5, in_flight=1)
    slack = running(state, group, [1] * 30, max_tokens=30, priority=3)
    urgent = running(state, group, [2] * 31, max_tokens=30, priority=1)
    while not slack.timeline.preemptions:
        step(state, group)
        assert urgent.state is RequestState.RUNNING
    assert urgent.timeline.preemptions == 0
    assert slack.wait_reason is WaitReason.NO_BLOCKS
    state.check()


def test_among_equals_the_last_admitted_is_the_victim():
    state = make_state(Policy.PRIORITY)
    group = add_group(state, blocks=5, in_flight=1)
    first, second = (running(state, group, [number] * 30, max_tokens=30, priority=2) for number in (1, 2))
    while not second.timeline.preemptions:
        step(state, group)
    assert first.timeline.preemptions == 0


@pytest.mark.composes("priority", "preemption")
@pytest.mark.parametrize("policy", list(Policy))
@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(-2, 2)), min_size=1, max_size=12),
    blocks=st.integers(8, 14),
    in_flight=st.integers(1, 2),
)
def test_everybody_comes_to_an_end_and_no_victim_is_ahead_of_one_who_grew(
    policy: Policy, requests: list[tuple[int, int, int]], blocks: int, in_flight: int
):
    state = make_state(policy)
    group = add_group(state, blocks=blocks, slots=4, in_flight=in_flight)
    for number, (prompt, output, priority) in enumerate(requests, 1):
        submit(state, [number] * prompt, max_tokens=output, priority=priority, cacheable=False)
    for _ in range(3000):
        if not state.requests:
            break
        before = list(group.running)
        step_or_wait(state, group)
        staying = [request for request in before if request.state is not RequestState.ENDED]
        preempted = [request for request in staying if request.residency is None]
        # What is left of those who ran is the head of their order.
        assert preempted == staying[len(staying) - len(preempted) :]
        state.check()
    assert not state.requests


def step_or_wait(state: SchedulerState, group: Group) -> None:
    """Plans once, and then answers what is in flight, oldest first."""
    if plan(state, group, 1) is None:
        assert group.in_flight, "no progress"
    apply(state, group, ok(group.in_flight[0]), 1)
