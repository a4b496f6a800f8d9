"""Groups of different size: a request is admitted where it fits to its last token, and is in nobody's way elsewhere."""

from __future__ import annotations

from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.planner import plan
from services.scheduler.core.request import Request, RequestState, WaitReason
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import failed, planned, step, submit


def two_groups(**limits: object) -> tuple[SchedulerState, Group, Group]:
    """A large group and a small one."""
    state = make_state(**limits)  # type: ignore[arg-type]
    return state, add_group(state, "large", blocks=8), add_group(state, "small", blocks=2)


def opened(state: SchedulerState, group: Group) -> list[Request]:
    return [entry.request for entry in planned(state, group).opens]


def test_a_request_too_large_for_a_group_waits_for_another_and_lets_others_pass():
    state, large, small = two_groups()
    big, little = submit(state, [1] * 30, max_tokens=4), submit(state, [2] * 10)
    assert opened(state, small) == [little]
    assert big.wait_reason is WaitReason.GROUP_TOO_SMALL
    assert opened(state, large) == [big]


def test_what_fits_to_its_last_computed_token_fits():
    state, _, small = two_groups()
    exact = submit(state, [1] * 30, max_tokens=3)  # 32 tokens of KV: the last one is never computed
    while exact.state is not RequestState.ENDED:
        step(state, small)
    assert len(exact.output_ids) == 3
    assert exact.timeline.preemptions == 0


def test_a_preempted_request_is_not_resumed_where_it_would_not_fit():
    state, large, small = two_groups()
    big = submit(state, [1] * 30, max_tokens=20)
    step(state, large)
    state.requeue(big, "preempted", 2)
    assert plan(state, small, 2) is None
    assert opened(state, large) == [big]


def test_suspects_are_run_by_a_group_that_holds_them_and_freeze_no_other():
    state, large, small = two_groups(max_tokens_per_step=64)
    big = submit(state, [1] * 30, max_tokens=20)
    apply(state, large, failed(planned(state, large)), 1)
    assert list(state.quarantine.suspects) == [big]
    lose_group(state, large, 2, crashed=False)
    assert not state.is_isolated(small)
    little = submit(state, [2] * 10)
    assert opened(state, small) == [little]
    large = add_group(state, "large", blocks=8, epoch=2)
    assert state.is_isolated(large)
    step(state, large)
    assert not state.quarantine.suspects
    assert big.state is RequestState.RUNNING


def test_suspects_go_to_a_group_that_is_left_if_it_holds_them():
    state, large, small = two_groups(max_tokens_per_step=64)
    submit(state, [1] * 10)
    apply(state, large, failed(planned(state, large)), 1)
    assert (state.is_isolated(large), state.is_isolated(small)) == (True, False)
    lose_group(state, large, 2, crashed=False)
    assert state.is_isolated(small)


def test_the_capacity_is_the_largest_groups_and_shrinks_with_it():
    state, large, _ = two_groups()
    assert state.capacity_tokens() == 128
    big = submit(state, [1] * 60)
    lose_group(state, large, 2, crashed=False)
    assert state.capacity_tokens() == 32
    assert state.fail_unfit(3).ended == [big]
    state.check()


def test_the_length_that_a_group_runs_counts_too():
    state, large, _ = two_groups()
    long, short = submit(state, [1] * 60), submit(state, [1] * 56)
    large.max_model_len = 64
    assert (large.holds(long), large.holds(short), state.capacity_tokens()) == (False, True, 64)
    assert state.fail_unfit(1).ended == [long]


def test_many_that_no_group_holds_are_in_nobodys_way_and_run_once_one_does():
    state, large, small = two_groups(max_requests=1000)
    big = [submit(state, [1] * 30, max_tokens=4, number=number) for number in range(1, 101)]
    little = submit(state, [2] * 10, number=999)
    lose_group(state, large, 2, crashed=False)
    assert state.shelve_unfit(2)
    assert opened(state, small) == [little]
    assert {request.wait_reason for request in big} == {WaitReason.GROUP_TOO_SMALL}
    state.check()
    large = add_group(state, "large", blocks=8)
    assert not state.shelve_unfit(3)
    assert opened(state, large)[0] is big[0]
    state.check()


def test_a_family_that_no_group_holds_waits_together_and_runs_together():
    state, large, _ = two_groups()
    parent = submit(state, [1] * 30, max_tokens=4)
    child = submit(state, [1] * 30, max_tokens=4, parent=parent)
    lose_group(state, large, 2, crashed=False)
    assert state.shelve_unfit(2)
    assert child.wait_reason is WaitReason.PARENT_PROMPT
    large = add_group(state, "large", blocks=8)
    assert not state.shelve_unfit(3)
    step(state, large)
    assert opened(state, large) == [child]
