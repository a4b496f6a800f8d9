"""Leases in the core: when they are granted and how long, what a cut withdraws, and which answers count."""

from __future__ import annotations

import pytest

from libs.blocks import BLOCK_SIZE
from services.scheduler.convert import to_batch, to_cut
from services.scheduler.core.apply import apply, close, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.leases import can_dispatch, cut, messages_in_flight, open_lease, wants_cut
from services.scheduler.core.plan import BatchOutcome, Cut, RowOutcome, StepOutcome, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.request import CancelReason, Request, RequestState
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import failed, not_run, ok, planned, step, submit

STEPS = 8


@pytest.fixture
def state() -> SchedulerState:
    return make_state()


@pytest.fixture
def group(state: SchedulerState) -> Group:
    return add_group(state, blocks=16)


def decoding(state: SchedulerState, group: Group, count: int = 2, *, max_tokens: int = 40) -> list[Request]:
    """Requests whose prompts are computed."""
    requests = [submit(state, [number + 1] * 3, max_tokens=max_tokens) for number in range(count)]
    step(state, group)
    assert all(len(request.output_ids) == 1 for request in requests)
    return requests


def leased(state: SchedulerState, group: Group, most: int = STEPS) -> StepPlan:
    """The next batch, with leave to be a lease."""
    lease = plan(state, group, 1, most)
    assert lease is not None
    return lease


def answer(state: SchedulerState, group: Group, count: int = 1) -> None:
    """The worker answers so many steps, as ordered."""
    for _ in range(count):
        apply(state, group, ok(group.in_flight[0]), 1)


def closed(group: Group, lease: StepPlan, last_step: int) -> Cut:
    return Cut(group.epoch, lease.number, last_step)


def test_a_batch_without_leave_is_one_step(state: SchedulerState, group: Group):
    decoding(state, group)
    batch = planned(state, group)
    assert (batch.steps, batch.lease, batch.settles) == (1, None, batch.number)
    assert to_batch(batch, lambda _: None).lease_steps == 1


def test_a_lease_is_one_message_and_a_plan_for_each_step(state: SchedulerState, group: Group):
    requests = decoding(state, group)
    lease = leased(state, group)
    wire = to_batch(lease, lambda _: None)
    assert (wire.lease_steps, list(wire.counts), wire.samples) == (STEPS, [1, 1], b"\1\1")
    numbers = [each.number for each in group.in_flight]
    assert numbers == list(range(lease.number, lease.number + STEPS))
    assert [each.predecessor for each in group.in_flight] == [1, *numbers[:-1]]
    assert [each.is_later for each in group.in_flight] == [False] + [True] * (STEPS - 1)
    assert messages_in_flight(group) == 1
    for request in requests:
        assert request.residency is not None
        assert (request.residency.planned, request.unresolved, request.unresolved_samples) == (3 + STEPS, STEPS, STEPS)


def test_each_step_is_answered_and_counted_by_itself(state: SchedulerState, group: Group):
    requests = decoding(state, group)
    leased(state, group)
    steps, of_request = state.counters.steps, requests[0].timeline.steps
    effects = apply(state, group, ok(group.in_flight[0], token=9), 1)
    assert [(delta.first_index, list(delta.tokens)) for delta in effects.deltas] == [(1, [9]), (1, [9])]
    assert (state.counters.steps, requests[0].timeline.steps) == (steps, of_request)
    answer(state, group)
    assert (state.counters.steps, requests[0].timeline.steps) == (steps + 1, of_request + 1)
    answer(state, group, STEPS - 2)
    assert not group.in_flight
    assert len(requests[0].output_ids) == 1 + STEPS
    state.check()


def test_the_blocks_of_all_steps_travel_with_the_first(state: SchedulerState, group: Group):
    request = decoding(state, group, 1)[0]
    lease = leased(state, group, 20)
    assert request.residency is not None
    assert [len(row.new_blocks) for row in lease.rows] == [1]
    assert len(request.residency.blocks) == 2
    assert not any(row.new_blocks for later in list(group.in_flight)[1:] for row in later.rows)


@pytest.mark.parametrize(("left", "steps"), [(1, 1), (2, 2), (5, 5), (30, STEPS)])
def test_nobodys_last_token_is_passed(state: SchedulerState, group: Group, left: int, steps: int):
    decoding(state, group, 1, max_tokens=60)
    submit(state, [9], max_tokens=left + 1)
    step(state, group)
    assert leased(state, group).steps == steps


def test_a_lease_is_as_long_as_the_blocks_allow_without_the_reserve():
    state = make_state()
    group = add_group(state, blocks=3)
    submit(state, [1] * 15, max_tokens=30)
    step(state, group)
    lease = leased(state, group, 30)  # from 15 computed tokens: the reserve is one of the two blocks that are left
    assert lease.steps == 15  # 29 further steps, halved once, end within the second block
    assert group.ledger.available == 1


def test_a_lease_that_needs_no_blocks_needs_no_reserve():
    state = make_state()
    group = add_group(state, blocks=1)
    submit(state, [1] * 3, max_tokens=14)
    step(state, group)
    assert group.ledger.available == 0
    assert leased(state, group).steps == STEPS


def test_nobody_is_preempted_for_a_longer_lease():
    state = make_state()
    group = add_group(state, blocks=3)
    first, second = (submit(state, [number] * 14, max_tokens=30) for number in (1, 2))
    step(state, group)
    step(state, group)
    assert leased(state, group, 30).steps == 1
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.RUNNING)
    assert state.counters.preemptions == 0


def test_who_waits_for_a_step_only_keeps_steps_single():
    state = make_state(max_tokens_per_step=4)
    group = add_group(state, blocks=16)
    submit(state, [1] * 3, max_tokens=40)
    step(state, group)
    submit(state, [2] * 7, max_tokens=40)
    assert leased(state, group).steps == 1  # a chunk rides along
    answer(state, group)
    assert leased(state, group).steps == 1


def test_who_waits_for_a_slot_is_in_no_leases_way():
    state = make_state(max_sequences=1)
    group = add_group(state, blocks=16)
    decoding(state, group, 1)
    submit(state, [2])
    assert leased(state, group).steps == STEPS
    assert not wants_cut(state, group)


def test_pipeline_stages_take_no_leases(state: SchedulerState):
    group = state.groups["deep"] = Group.new("deep", 1, num_blocks=16, num_slots=4, distance=2)
    decoding(state, group)
    assert leased(state, group).steps == 1


def test_suspects_take_no_leases(state: SchedulerState, group: Group):
    requests = decoding(state, group)
    state.quarantine.accuse(requests, group.name)
    assert leased(state, group).steps == 1


def test_a_closing_slot_alone_is_no_lease(state: SchedulerState, group: Group):
    request = decoding(state, group, 1)[0]
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
    batch = leased(state, group)
    assert (batch.rows, batch.steps) == ([], 1)


def test_nothing_is_planned_behind_a_lease_but_during_its_last_step(state: SchedulerState, group: Group):
    decoding(state, group)
    lease = leased(state, group)
    for _ in range(STEPS - 1):
        assert not can_dispatch(group)
        assert plan(state, group, 1, STEPS) is None
        answer(state, group)
    following = leased(state, group)
    assert following.predecessor == lease.number + STEPS - 1
    assert messages_in_flight(group) == 2
    assert cut(group) is not None, "the lease behind the running step can be cut"


def test_a_cut_is_asked_for_once_and_names_the_step_that_runs(state: SchedulerState, group: Group):
    decoding(state, group)
    lease = leased(state, group)
    answer(state, group, 2)
    asked = cut(group)
    assert asked == Cut(group.epoch, lease.number, lease.number + 2)
    assert cut(group) is None
    wire = to_cut(asked)
    assert (wire.epoch, wire.number, wire.last_step) == (group.epoch, lease.number, lease.number + 2)


def test_a_lease_that_waits_behind_another_batch_is_cut_to_its_first_step(state: SchedulerState, group: Group):
    decoding(state, group)
    planned(state, group)
    lease = leased(state, group)
    assert cut(group) == Cut(group.epoch, lease.number, lease.number)


@pytest.mark.parametrize("answered", [0, 1, 3])
def test_what_is_cut_is_planned_no_more_and_the_next_batch_names_the_last_step(state: SchedulerState, group: Group, answered: int):
    requests = decoding(state, group)
    lease = leased(state, group)
    answer(state, group, answered)
    cut(group)
    last = lease.number + max(answered, 1)
    close(state, group, closed(group, lease, last), 1)
    assert [each.number for each in group.in_flight] == list(range(lease.number + answered, last + 1))
    for request in requests:
        assert request.residency is not None
        assert request.residency.planned == 3 + last - lease.number + 1
        assert request.unresolved == request.unresolved_samples == len(group.in_flight)
    following = leased(state, group)
    assert following.predecessor == last
    assert following.number == lease.number + STEPS, "a number of a step that never ran is not given again"
    answer(state, group, len(group.in_flight))
    state.check()


def test_an_answer_that_comes_after_the_last_result_frees_what_drains(state: SchedulerState, group: Group):
    request = decoding(state, group, 1)[0]
    lease = leased(state, group)
    answer(state, group)
    cut(group)
    answer(state, group)
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert group.ledger.draining == 1
    close(state, group, closed(group, lease, lease.number + 1), 1)
    assert (group.ledger.draining, len(group.in_flight)) == (0, 0)
    assert (state.counters.cut_leases, state.counters.stale_closed) == (1, 0)


def test_blocks_drain_until_the_last_step_that_runs(state: SchedulerState, group: Group):
    request = decoding(state, group, 1)[0]
    lease = leased(state, group)
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert wants_cut(state, group)
    cut(group)
    close(state, group, closed(group, lease, lease.number + 1), 1)
    answer(state, group)
    assert group.ledger.draining == 1
    answer(state, group)
    assert group.ledger.draining == 0


def test_blocks_of_steps_that_were_cut_stay_with_their_sequence(state: SchedulerState, group: Group):
    request = decoding(state, group, 1)[0]
    lease = leased(state, group, 20)
    assert request.residency is not None
    held = list(request.residency.blocks)
    cut(group)
    close(state, group, closed(group, lease, lease.number), 1)
    answer(state, group)
    assert request.residency.blocks == held
    again = leased(state, group, 20)
    assert len(held) * BLOCK_SIZE >= 4 + again.steps
    assert not again.rows[0].new_blocks


@pytest.mark.parametrize("what", ["epoch", "lease", "unasked", "again", "over"])
def test_an_answer_that_belongs_to_no_cut_lease_is_counted_and_ignored(state: SchedulerState, group: Group, what: str):
    decoding(state, group)
    lease = leased(state, group)
    said = closed(group, lease, lease.number + 1)
    if what != "unasked":
        cut(group)
    if what == "epoch":
        said = Cut(group.epoch + 1, said.number, said.last_step)
    elif what == "lease":
        said = Cut(group.epoch, said.number - 1, said.last_step)
    elif what == "again":
        close(state, group, said, 1)
    elif what == "over":
        answer(state, group, STEPS)
    before = list(group.in_flight)
    close(state, group, said, 1)
    assert list(group.in_flight) == before
    assert state.counters.stale_closed == 1


@pytest.mark.parametrize("last", [-3, 99])
def test_an_answer_beyond_the_lease_is_taken_for_its_nearest_step(state: SchedulerState, group: Group, last: int):
    decoding(state, group)
    lease = leased(state, group)
    cut(group)
    close(state, group, closed(group, lease, max(0, lease.number + last)), 1)
    assert len(group.in_flight) == (1 if last < 0 else STEPS)
    assert state.counters.cut_leases == (last < 0)


def test_a_cut_that_came_too_late_lets_the_lease_stand_and_opens_the_way(state: SchedulerState, group: Group):
    decoding(state, group)
    lease = leased(state, group)
    answer(state, group, STEPS - 2)
    cut(group)
    answer(state, group)
    assert not can_dispatch(group), "the last step may still be withdrawn"
    close(state, group, closed(group, lease, lease.number + STEPS - 1), 1)
    assert can_dispatch(group)
    assert (state.counters.cut_leases, state.counters.stale_closed) == (0, 0)


@pytest.mark.parametrize("close_first", [True, False])
def test_a_lease_that_fails_while_it_is_cut_is_replayed(state: SchedulerState, group: Group, close_first: bool):
    requests = decoding(state, group)
    lease = leased(state, group)
    answer(state, group)
    cut(group)
    said = closed(group, lease, lease.number + 1)
    if close_first:
        close(state, group, said, 1)
        apply(state, group, failed(group.in_flight[0]), 1)
    else:
        apply(state, group, failed(group.in_flight[0]), 1)
        assert group.broken
        close(state, group, said, 1)
    assert not group.broken
    assert {request.state for request in requests} == {RequestState.WAITING}
    assert planned(state, group).predecessor == 0
    state.check()


def test_what_follows_a_failed_step_of_a_lease_is_not_run_and_everybody_starts_over(state: SchedulerState, group: Group):
    requests = decoding(state, group)
    leased(state, group)
    answer(state, group)
    apply(state, group, failed(group.in_flight[0]), 1)
    assert not wants_cut(state, group), "its end is coming anyway"
    while group.in_flight:
        apply(state, group, not_run(group.in_flight[0]), 1)
    assert [len(request.output_ids) for request in requests] == [2, 2]
    assert all(request.unresolved == 0 for request in requests)


def test_a_row_that_ended_within_a_lease_asks_for_a_cut_and_the_others_go_on(state: SchedulerState, group: Group):
    first = submit(state, [1] * 3, max_tokens=40)
    second = decoding(state, group, 1)[0]
    leased(state, group)
    apply(state, group, ok(group.in_flight[0]), 1)
    state.cancel(first.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert wants_cut(state, group)
    head = group.in_flight[0]
    outcome = StepOutcome(head.epoch, head.number, BatchOutcome.OK, [RowOutcome.NOT_RUN, RowOutcome.OK], [[], [7]])
    apply(state, group, outcome, 1)
    assert second.output_ids[-1] == 7
    assert second.state is RequestState.RUNNING


def test_an_arrival_that_fits_asks_for_a_cut_and_one_that_does_not_fit_asks_for_none():
    state = make_state()
    group = add_group(state, blocks=4)
    decoding(state, group, 1)
    leased(state, group)
    big = submit(state, [2] * 40)
    assert not wants_cut(state, group)
    state.cancel(big.key, CancelReason.CLIENT_DISCONNECTED, 1)
    submit(state, [2] * 3)
    assert wants_cut(state, group)
    cut(group)
    assert not wants_cut(state, group)


def test_a_lost_group_leaves_no_step_of_a_lease_behind(state: SchedulerState, group: Group):
    requests = decoding(state, group)
    leased(state, group)
    answer(state, group, 3)
    lose_group(state, group, 1, crashed=False)
    assert [(request.unresolved, request.unresolved_samples, len(request.output_ids)) for request in requests] == [(0, 0, 4)] * 2
    assert open_lease(group) is None
    state.check()
