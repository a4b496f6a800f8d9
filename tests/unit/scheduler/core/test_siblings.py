"""n > 1: children wait for the parent's prompt in nobody's way, share its full blocks, and go on alone when it is gone."""

from __future__ import annotations

import pytest

from libs.blocks import BLOCK_SIZE
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.planner import plan
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import CancelReason, Request, RequestState, WaitReason
from services.scheduler.core.siblings import Siblings
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_request, make_state
from tests.unit.scheduler.core.outcomes import failed, ok, planned, shape, step, submit

PROMPT = [*range(1, 36)]  # two full blocks and three tokens


@pytest.fixture(params=[True, False], ids=["prefix-caching", "no-prefix-caching"])
def caching(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def family(state: SchedulerState, choices: int = 2, prompt: list[int] | None = None, **fields: object) -> tuple[Request, list[Request]]:
    parent = submit(state, prompt or PROMPT, **fields)  # type: ignore[arg-type]
    return parent, [submit(state, prompt or PROMPT, parent=parent, **fields) for _ in range(choices - 1)]  # type: ignore[arg-type]


def run_to_the_end(state: SchedulerState, group: Group) -> None:
    for _ in range(500):
        if not state.requests:
            return
        step(state, group)
        state.check()
    raise AssertionError(f"no end: {[(str(r.key), r.wait_reason) for r in state.requests.values()]}")


def residency_blocks(request: Request) -> list[int]:
    assert request.residency is not None
    return request.residency.blocks


def test_a_child_waits_for_the_whole_prompt_and_then_computes_only_the_tail(caching: bool):
    state = make_state(max_tokens_per_step=20, prefix_caching=caching)
    group = add_group(state)
    parent, (child,) = family(state)
    assert child.wait_reason is WaitReason.PARENT_PROMPT
    step(state, group)
    assert (child.state, child.wait_reason) == (RequestState.WAITING, WaitReason.PARENT_PROMPT)
    step(state, group)
    assert parent.prompt_is_computed
    batch = planned(state, group)
    assert shape(batch) == [(parent.key.id, 35, 1, True), (child.key.id, 32, 3, True)]
    assert residency_blocks(child)[:2] == residency_blocks(parent)[:2]
    assert residency_blocks(child)[2] != residency_blocks(parent)[2]
    assert state.counters.sibling_shared == 32


def test_children_need_not_wait_for_a_parent_whose_whole_prompt_is_in_the_cache():
    state = make_state(max_tokens_per_step=40)
    group = add_group(state, blocks=16)
    prompt = [7] * 32
    first = submit(state, prompt)
    run_to_the_end(state, group)
    parent = submit(state, prompt, outputs=first.output_ids[:2], attempt=1)
    child = submit(state, prompt, parent=parent)
    assert child.wait_reason is WaitReason.PARENT_PROMPT
    batch = planned(state, group)
    state.check()
    assert (parent.state, child.state) == (RequestState.RUNNING, RequestState.RUNNING)
    apply(state, group, ok(batch), 1)
    run_to_the_end(state, group)


def test_of_a_prompt_that_ends_with_a_block_the_last_block_is_computed_again(caching: bool):
    state = make_state(prefix_caching=caching)
    group = add_group(state)
    _, (child,) = family(state, prompt=[7] * 32)
    step(state, group)
    planned(state, group)
    assert child.residency is not None
    assert (child.residency.computed, child.timeline.chunks) == (BLOCK_SIZE, 1)
    state.check()


def test_a_batch_in_flight_is_not_a_computed_prompt(caching: bool):
    state = make_state(max_tokens_per_step=64, prefix_caching=caching)
    group = add_group(state)
    _, (child,) = family(state)
    planned(state, group)
    plan(state, group, 2)
    assert child.wait_reason is WaitReason.PARENT_PROMPT


def test_a_hundred_children_are_in_nobodys_way():
    state = make_state(max_tokens_per_step=16, max_requests=200)
    group = add_group(state, blocks=16)
    family(state, choices=101)
    other = submit(state, [9] * 5)
    step(state, group)
    step(state, group)
    step(state, group)
    assert other.state is RequestState.RUNNING


def test_without_prefix_caching_nobody_but_the_family_finds_the_blocks():
    state = make_state(prefix_caching=False, max_tokens_per_step=128)
    group = add_group(state, blocks=16)
    family(state)
    step(state, group)
    step(state, group)
    stranger, (cousin,) = family(state)
    batch = planned(state, group)
    assert [(entry.request, entry.computed) for entry in batch.opens] == [(stranger, 0)]
    apply(state, group, ok(batch), 1)
    assert [(entry.request, entry.computed) for entry in planned(state, group).opens] == [(cousin, 32)]
    assert residency_blocks(cousin)[:2] == residency_blocks(stranger)[:2]
    counters = state.counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.sibling_shared) == (0, 0, 64)


def test_without_prefix_caching_a_first_choice_does_not_even_find_its_own_blocks_again():
    state = make_state(prefix_caching=False, max_tokens_per_step=64)
    group = add_group(state)
    parent = submit(state, PROMPT)
    step(state, group)
    state.requeue(parent, "preempted", 2)
    assert planned(state, group).opens[0].computed == 0


@pytest.mark.parametrize("when", ["waiting", "running", "computed"])
def test_children_of_a_cancelled_parent_go_on_alone(caching: bool, when: str):
    state = make_state(max_tokens_per_step=20, prefix_caching=caching)
    group = add_group(state)
    parent, children = family(state, choices=3)
    for _ in range(["waiting", "running", "computed"].index(when)):
        step(state, group)
    state.cancel(parent.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert all(child.wait_reason is not WaitReason.PARENT_PROMPT for child in children)
    run_to_the_end(state, group)
    assert [len(child.output_ids) for child in children] == [8, 8]


def test_a_parent_that_ends_with_its_first_token_leaves_its_blocks_to_the_children(caching: bool):
    state = make_state(max_tokens_per_step=64, prefix_caching=caching)
    group = add_group(state)
    parent, (child,) = family(state, max_tokens=1)
    step(state, group)
    assert parent.state is RequestState.ENDED
    assert planned(state, group).opens[0].computed == 32
    assert child.cached_tokens == 0


def test_a_parent_preempted_in_its_prompt_is_waited_for_and_one_preempted_later_is_not(caching: bool):
    state = make_state(max_tokens_per_step=20, prefix_caching=caching)
    group = add_group(state)
    parent, (child,) = family(state)
    step(state, group)
    state.requeue(parent, "preempted", 2)
    assert child.wait_reason is WaitReason.PARENT_PROMPT
    while not parent.prompt_is_computed:
        step(state, group)
    state.requeue(parent, "preempted", 3)
    assert child.wait_reason is WaitReason.NEW
    run_to_the_end(state, group)
    assert len(parent.output_ids) == len(child.output_ids) == 8


def test_a_lost_group_delays_a_family_and_another_group_goes_on(caching: bool):
    state = make_state(max_tokens_per_step=20, prefix_caching=caching)
    parent, children = family(state, choices=3)
    group = add_group(state)
    batch = planned(state, group)
    lose_group(state, group, 2, crashed=True)
    state.wait_all(WaitReason.NO_WORKER, 2)
    assert (parent.wait_reason, children[0].wait_reason) == (WaitReason.NO_WORKER, WaitReason.PARENT_PROMPT)
    other = add_group(state, "g1")
    assert apply(state, other, ok(batch), 3).deltas == []
    run_to_the_end(state, other)
    assert [len(request.output_ids) for request in (parent, *children)] == [8, 8, 8]


def test_children_that_become_free_without_a_worker_say_so():
    state = make_state()
    parent, (child,) = family(state)
    state.cancel(parent.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert child.wait_reason is WaitReason.NO_WORKER


def test_a_poisonous_parent_does_not_take_its_children_with_it():
    state = make_state(max_tokens_per_step=64)
    group = add_group(state)
    parent, (child,) = family(state)
    while parent.state is not RequestState.ENDED:
        apply(state, group, failed(planned(state, group)), 1)
    assert parent.ending is not None
    assert parent.ending.error is not None
    run_to_the_end(state, group)
    assert len(child.output_ids) == 8


def test_a_child_in_another_group_computes_the_prompt_itself():
    state = make_state(max_tokens_per_step=64)
    group, other = add_group(state, "g0"), add_group(state, "g1")
    parent, (child,) = family(state)
    step(state, group)
    assert [(entry.request, entry.computed) for entry in planned(state, other).opens] == [(child, 0)]
    assert parent.state is RequestState.RUNNING
    assert state.counters.sibling_shared == 0


def test_a_child_more_urgent_than_its_parent_does_not_stop_it():
    state = make_state(Policy.PRIORITY, max_tokens_per_step=20)
    group = add_group(state)
    parent = submit(state, PROMPT, priority=5)
    child = submit(state, PROMPT, parent=parent, priority=-5)
    run_to_the_end(state, group)
    assert len(parent.output_ids) == len(child.output_ids) == 8


def test_the_child_of_a_child_waits_for_it():
    state = make_state(max_tokens_per_step=64)
    group = add_group(state, blocks=16)
    _, (child,) = family(state)
    grandchild = submit(state, PROMPT, parent=child)
    step(state, group)
    step(state, group)
    assert planned(state, group).opens[0].request is grandchild


@pytest.mark.parametrize("prompt_length", [5, 35])
def test_a_parent_without_named_blocks_is_still_waited_for_and_nothing_is_shared(prompt_length: int):
    state = make_state(max_tokens_per_step=64)
    group = add_group(state)
    parent = submit(state, PROMPT[:prompt_length], cacheable=False)
    child = submit(state, PROMPT[:prompt_length], cacheable=False, parent=parent)
    step(state, group)
    assert [(entry.request, entry.computed) for entry in planned(state, group).opens] == [(child, 0)]


class TestWhoWaits:
    def test_nobody_for_a_parent_that_is_unknown_computed_or_oneself(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        stranger = make_request(make_state(), [1])
        assert submit(state, PROMPT, parent=stranger, number=50).wait_reason is WaitReason.NEW
        parent = submit(state, [4] * 20)
        step(state, group)
        assert submit(state, [4] * 20, parent=parent).wait_reason is WaitReason.NEW
        own = make_request(state, PROMPT)
        own.parent = own.key
        state.accept(own)
        assert own.wait_reason is WaitReason.NEW
        state.check()

    def test_a_child_that_is_cancelled_waits_no_longer(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        _, (first, second) = family(state, choices=3)
        state.cancel(first.key, CancelReason.CLIENT_DISCONNECTED, 1)
        state.check()
        step(state, group)
        assert [entry.request for entry in planned(state, group).opens] == [second]

    def test_the_check_finds_children_that_nobody_would_release(self):
        state, siblings = make_state(), Siblings()
        parent, child = make_request(state, PROMPT), make_request(state, PROMPT)
        siblings.hold(child, parent)
        siblings.check({parent.key: parent})
        with pytest.raises(ValueError, match="1 children wait for 7:1"):
            siblings.check({})

    def test_a_released_child_is_given_out_once(self):
        state, siblings = make_state(), Siblings()
        parent, child = make_request(state, PROMPT), make_request(state, PROMPT)
        siblings.hold(child, parent)
        assert siblings.release(parent.key) == [child]
        assert siblings.release(parent.key) == []
        siblings.discard(child)
