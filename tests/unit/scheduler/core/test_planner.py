"""What runs in a step and why the rest waits: budget, slots, blocks, prefixes, preemption."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from services.scheduler.core.apply import apply
from services.scheduler.core.group import Group
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.request import CancelReason, Request, RequestState, WaitReason
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import failed, ok, planned, shape, step, submit


def decoding(state: SchedulerState, group: Group, prompt: list[int], **fields: object) -> Request:
    """A request that has its first token."""
    request = submit(state, prompt, **fields)  # type: ignore[arg-type]
    while not request.output_ids:
        step(state, group)
    return request


class TestBudget:
    def test_nothing_to_do_is_no_plan(self):
        state = make_state()
        group = add_group(state)
        assert plan(state, group, 1) is None
        assert group.last_number == 0

    def test_a_long_prompt_is_split_and_only_its_last_chunk_samples(self):
        state = make_state(max_tokens_per_step=32)
        group = add_group(state)
        submit(state, [1] * 70)
        shapes = [shape(step(state, group)[0]) for _ in range(4)]
        assert shapes == [[(1, 0, 32, False)], [(1, 32, 32, False)], [(1, 64, 6, True)], [(1, 70, 1, True)]]

    def test_what_one_prompt_leaves_the_next_one_takes(self):
        state = make_state(max_tokens_per_step=32)
        group = add_group(state)
        submit(state, [1] * 20)
        submit(state, [2] * 40)
        assert shape(planned(state, group)) == [(1, 0, 20, True), (2, 0, 12, False)]

    def test_no_further_prompt_begins_where_there_is_enough_of_them(self):
        state = make_state(max_tokens_per_step=64, enough_prefill=20)
        group = add_group(state, blocks=20)
        for number, length in enumerate((12, 10, 30, 5), 1):
            submit(state, [number] * length)
        assert shape(step(state, group)[0]) == [(1, 0, 12, True), (2, 0, 10, True)]
        waiting = state.queue.peek()
        assert waiting is not None
        assert waiting.wait_reason is WaitReason.TOKEN_BUDGET
        assert shape(step(state, group)[0]) == [(1, 12, 1, True), (2, 10, 1, True), (3, 0, 30, True)]
        assert shape(step(state, group)[0])[-1] == (4, 0, 5, True)

    def test_prompts_that_have_begun_go_on_however_many_there_are(self):
        state = make_state(max_tokens_per_step=30, enough_prefill=5)
        group = add_group(state, blocks=20)
        submit(state, [1] * 40)
        assert shape(step(state, group)[0]) == [(1, 0, 30, False)]
        submit(state, [2] * 20)
        assert shape(step(state, group)[0]) == [(1, 30, 10, True)]
        assert shape(step(state, group)[0]) == [(1, 40, 1, True), (2, 0, 20, True)]

    def test_decodes_come_before_prompts_that_began_earlier(self):
        state = make_state(max_tokens_per_step=16)
        group = add_group(state)
        submit(state, [1] * 40)
        first = planned(state, group)
        assert shape(first) == [(1, 0, 16, False)]
        apply(state, group, ok(first), 1)
        state.limits = make_state(max_tokens_per_step=40).limits
        submit(state, [2] * 5)
        step(state, group)
        state.limits = make_state(max_tokens_per_step=4).limits
        assert [row.prefill for row in planned(state, group).rows] == [False, False]

    def test_a_decode_takes_its_token_before_a_chunk_does(self):
        state = make_state(max_tokens_per_step=16)
        group = add_group(state)
        decode = decoding(state, group, [2] * 5)
        submit(state, [1] * 40)
        batch = planned(state, group)
        assert shape(batch) == [(decode.key.id, 5, 1, True), (2, 0, 15, False)]
        assert batch.is_mixed

    def test_decodes_beyond_the_budget_wait_and_say_so(self):
        state = make_state(max_tokens_per_step=8)
        group = add_group(state)
        first, second = decoding(state, group, [1] * 3), decoding(state, group, [2] * 3)
        state.limits = make_state(max_tokens_per_step=1).limits
        assert shape(planned(state, group)) == [(first.key.id, first.known - 1, 1, True)]
        assert second.wait_reason is WaitReason.TOKEN_BUDGET

    def test_without_chunking_a_prompt_runs_whole_or_not_at_all(self):
        state = make_state(max_tokens_per_step=128, chunked_prefill=False)
        group = add_group(state, blocks=32)
        submit(state, [1] * 100)
        late = submit(state, [2] * 40)
        assert shape(planned(state, group)) == [(1, 0, 100, True)]
        assert late.wait_reason is WaitReason.TOKEN_BUDGET

    def test_with_an_exhausted_budget_the_queue_waits_for_it(self):
        state = make_state(max_tokens_per_step=32)
        group = add_group(state)
        submit(state, [1] * 40)
        late = submit(state, [2])
        planned(state, group)
        assert late.wait_reason is WaitReason.TOKEN_BUDGET


class TestSlots:
    def test_no_more_requests_run_than_the_worker_has_slots(self):
        state = make_state()
        group = add_group(state, slots=2)
        everyone = [submit(state, [number]) for number in range(1, 4)]
        assert len(planned(state, group).rows) == 2
        assert everyone[2].wait_reason is WaitReason.NO_SLOT

    def test_no_more_requests_run_than_the_configuration_allows(self):
        state = make_state(max_sequences=2)
        group = add_group(state)
        for number in range(1, 4):
            submit(state, [number])
        assert len(planned(state, group).rows) == 2

    def test_a_slot_that_is_given_away_again_is_opened_and_not_closed(self):
        state = make_state()
        group = add_group(state, slots=1)
        decoding(state, group, [1], max_tokens=1)
        submit(state, [2])
        batch = planned(state, group)
        assert (batch.closes, [entry.residency.slot for entry in batch.opens]) == ([], [0])

    def test_a_slot_that_stays_empty_is_closed_once(self):
        state = make_state()
        group = add_group(state, slots=2)
        decoding(state, group, [1], max_tokens=1)
        group.free_slots.reverse()
        submit(state, [2])
        assert planned(state, group).closes == [0]
        assert not group.closing

    def test_closes_of_a_failed_batch_are_sent_again(self):
        state = make_state()
        group = add_group(state, slots=3)
        decoding(state, group, [1], max_tokens=1)
        group.free_slots.reverse()
        submit(state, [2])
        batch = planned(state, group)
        apply(state, group, failed(batch), 1)
        assert 0 in planned(state, group).closes


class TestChain:
    def test_batches_name_their_predecessors(self):
        state = make_state()
        group = add_group(state, in_flight=2)
        submit(state, [1])
        first, second = planned(state, group), planned(state, group)
        assert [(b.number, b.predecessor) for b in (first, second)] == [(1, 0), (2, 1)]

    def test_no_more_batches_are_in_flight_than_the_worker_takes(self):
        state = make_state()
        group = add_group(state, in_flight=2)
        submit(state, [1])
        planned(state, group)
        planned(state, group)
        assert plan(state, group, 1) is None

    def test_a_decode_in_flight_is_followed_before_its_token_is_known(self):
        state = make_state()
        group = add_group(state, in_flight=3)
        submit(state, [1] * 5)
        shapes = [shape(planned(state, group)) for _ in range(3)]
        assert shapes == [[(1, 0, 5, True)], [(1, 5, 1, True)], [(1, 6, 1, True)]]

    def test_nothing_is_planned_past_the_last_token(self):
        state = make_state()
        group = add_group(state, in_flight=3)
        submit(state, [1] * 5, max_tokens=2)
        assert shape(planned(state, group)) == [(1, 0, 5, True)]
        assert shape(planned(state, group)) == [(1, 5, 1, True)]
        assert plan(state, group, 1) is None

    def test_a_broken_group_is_sent_nothing_until_all_its_batches_have_reported(self):
        state = make_state()
        group = add_group(state, in_flight=2)
        submit(state, [1])
        first, second = planned(state, group), planned(state, group)
        apply(state, group, failed(first), 1)
        assert plan(state, group, 1) is None
        apply(state, group, failed(second), 1)
        assert planned(state, group).predecessor == 0

    @pytest.mark.parametrize("distance", [1, 2, 3])
    def test_a_request_stands_in_batches_no_closer_than_the_feed_forward_distance(self, distance: int):
        state = make_state()
        group = add_group(state, in_flight=4)
        group.feed_forward_distance = distance
        submit(state, [1] * 4, max_tokens=6)
        numbers, in_flight = list[int](), deque[StepPlan]()
        while state.requests:
            while (batch := plan(state, group, 1)) is not None:
                numbers.append(batch.number)
                in_flight.append(batch)
            apply(state, group, ok(in_flight.popleft()), 1)
        assert len(numbers) == 6
        assert all(later - earlier >= distance for earlier, later in itertools.pairwise(numbers))

    def test_two_requests_fill_a_pipeline_of_two_stages(self):
        state = make_state(max_tokens_per_step=4)
        group = add_group(state, in_flight=2)
        group.feed_forward_distance = 2
        submit(state, [1] * 4)
        submit(state, [2] * 4)
        batches = [planned(state, group), planned(state, group)]
        assert [shape(batch)[0][0] for batch in batches] == [1, 2]
        apply(state, group, ok(batches[0]), 1)
        assert shape(planned(state, group)) == [(1, 4, 1, True)]


class TestPrefixCache:
    def test_a_known_prefix_is_not_computed_again(self):
        state = make_state()
        group = add_group(state)
        decoding(state, group, [1] * 40, max_tokens=1)
        submit(state, [1] * 40)
        batch = planned(state, group)
        assert shape(batch) == [(2, 32, 8, True)]
        assert (batch.opens[0].computed, len(batch.opens[0].blocks)) == (32, 3)

    def test_the_last_token_of_a_prompt_is_always_computed(self):
        state = make_state()
        group = add_group(state)
        decoding(state, group, [1] * 32, max_tokens=1)
        submit(state, [1] * 32)
        assert shape(planned(state, group)) == [(2, 16, 16, True)]

    def test_a_prefix_in_flight_is_waited_for_and_others_pass(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        submit(state, [1] * 20)
        same, other = submit(state, [1] * 20), submit(state, [2] * 4)
        first = planned(state, group)
        assert shape(first) == [(1, 0, 20, True), (other.key.id, 0, 4, True)]
        assert same.wait_reason is WaitReason.PREFIX_IN_FLIGHT
        apply(state, group, ok(first), 1)
        assert (same.key.id, 16, 4, True) in shape(planned(state, group))

    def test_a_failed_batch_leaves_no_prefix(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        submit(state, [1] * 20)
        first = planned(state, group)
        same = submit(state, [1] * 20)
        apply(state, group, failed(first), 1)
        state.cancel(state.queue.peek().key, CancelReason.CLIENT_DISCONNECTED, 1)  # type: ignore[union-attr]
        assert shape(planned(state, group)) == [(same.key.id, 0, 20, True)]

    def test_caching_can_be_off(self):
        state = make_state(prefix_caching=False)
        group = add_group(state)
        decoding(state, group, [1] * 32, max_tokens=1)
        submit(state, [1] * 32)
        assert shape(planned(state, group)) == [(2, 0, 32, True)]

    def test_a_request_without_hashes_neither_reads_nor_fills_the_cache(self):
        state = make_state()
        group = add_group(state)
        decoding(state, group, [1] * 32, max_tokens=1, cacheable=False)
        assert group.ledger.cached == 0
        submit(state, [1] * 32, cacheable=False)
        assert shape(planned(state, group)) == [(2, 0, 32, True)]

    def test_blocks_of_generated_text_are_found_by_the_next_turn(self):
        state = make_state()
        group = add_group(state)
        first = decoding(state, group, [1] * 16, max_tokens=24)
        while first.state is not RequestState.ENDED:
            step(state, group)
        submit(state, [*first.prompt_ids, *first.output_ids, 9])
        assert planned(state, group).opens[0].computed == 32


class TestBlocks:
    def test_admission_takes_blocks_for_all_known_tokens_not_for_the_first_chunk(self):
        state = make_state(max_tokens_per_step=16)
        group = add_group(state)
        submit(state, [1] * 60)
        assert len(planned(state, group).opens[0].blocks) == 4

    def test_an_admission_leaves_running_requests_a_block_to_grow_into(self):
        state = make_state()
        group = add_group(state, blocks=4)
        decoding(state, group, [1] * 20)
        late = submit(state, [2] * 20)
        planned(state, group)
        assert late.wait_reason is WaitReason.NO_BLOCKS

    def test_a_lone_request_may_take_every_block(self):
        state = make_state()
        group = add_group(state, blocks=2)
        submit(state, [1] * 30, max_tokens=2)
        assert len(planned(state, group).opens[0].blocks) == 2

    def test_the_victim_is_the_last_admitted(self):
        state = make_state()
        group = add_group(state, blocks=5, in_flight=1)
        first, second = decoding(state, group, [1] * 31, max_tokens=30), decoding(state, group, [2] * 30, max_tokens=30)
        while not second.timeline.preemptions:
            step(state, group)
            assert first.state is RequestState.RUNNING
        assert first.timeline.preemptions == 0
        assert second.wait_reason is WaitReason.NO_BLOCKS
        state.check()

    def test_the_last_admitted_preempts_itself_and_nobody_else(self):
        state = make_state()
        group = add_group(state, blocks=4, in_flight=1)
        decoding(state, group, [1] * 17, max_tokens=12)
        second = decoding(state, group, [2] * 15, max_tokens=40)
        group.ledger.allocate(1)  # somebody's block, so that the next one is missing
        while second.state is RequestState.RUNNING:
            planned_rows = [row.request for row in step(state, group)[0].rows]
        assert second.timeline.preemptions == 1
        assert second not in planned_rows

    def test_draining_blocks_are_waited_for_before_anybody_is_preempted(self):
        state = make_state()
        group = add_group(state, blocks=4, in_flight=2)
        first = decoding(state, group, [1] * 16, max_tokens=20)
        gone = decoding(state, group, [2] * 16, max_tokens=20)
        last = submit(state, [3] * 4, max_tokens=20)
        ahead = planned(state, group)
        blocked = next(row.request for row in ahead.rows if row.request is first)
        state.cancel(gone.key, CancelReason.CLIENT_DISCONNECTED, 2)
        while plan(state, group, 2) is not None:
            pass
        assert group.ledger.draining
        assert blocked.timeline.preemptions == last.timeline.preemptions == 0
        state.check()

    def test_a_row_skips_its_step_while_blocks_drain_for_it(self):
        state = make_state()
        group = add_group(state, blocks=3, in_flight=2)
        first = submit(state, [1] * 15, max_tokens=20)
        gone = submit(state, [2] * 15, max_tokens=20)
        step(state, group)  # both have one token; each holds one block, and one is spare
        group.ledger.allocate(1)  # the spare one is somebody else's
        step(state, group)  # position 15: the last one of the first block
        assert first.known == 17
        both = None if plan(state, group, 3) is None else group.in_flight[-1]
        assert both is not None
        assert first.state is RequestState.RUNNING
        assert gone.timeline.preemptions == 1

    def test_a_preempted_request_is_not_admitted_before_its_rows_are_resolved(self):
        state = make_state()
        group = add_group(state)
        request = submit(state, [1] * 4)
        batch = planned(state, group)
        state.requeue(request, "preempted", 2)
        assert plan(state, group, 2) is None
        assert request.wait_reason is WaitReason.UNRESOLVED
        effects = apply(state, group, ok(batch), 3)
        assert [delta.tokens for delta in effects.deltas] == [[5]]
        assert shape(planned(state, group)) == [(1, 0, 5, True)]

    def test_a_resumption_sends_prompt_and_output_apart(self):
        state = make_state()
        group = add_group(state)
        request = decoding(state, group, [1] * 4)
        state.requeue(request, "preempted", 2)
        opened = planned(state, group).opens[0].request
        assert (opened.prompt_ids, opened.output_ids) == ([1] * 4, [5])


class TestOrder:
    def test_nobody_overtakes_the_head_of_the_queue(self):
        state = make_state()
        group = add_group(state, blocks=4)
        decoding(state, group, [1] * 17)
        large, small = submit(state, [2] * 40, max_tokens=2), submit(state, [3])
        batch = planned(state, group)
        assert large.wait_reason is WaitReason.NO_BLOCKS
        assert small not in [row.request for row in batch.rows]

    def test_whoever_stands_behind_a_waiting_head_is_told_so(self):
        state = make_state()
        group = add_group(state, slots=1)
        first, second, third = submit(state, [1]), submit(state, [2]), submit(state, [3])
        planned(state, group)
        assert (first.wait_reason, second.wait_reason) == (WaitReason.NEW, WaitReason.NO_SLOT)
        assert third.wait_reason is WaitReason.BEHIND

    def test_a_preempted_request_is_resumed_before_newer_ones(self):
        state = make_state()
        group = add_group(state, slots=1)
        first = decoding(state, group, [1])
        newer = submit(state, [2])
        state.requeue(first, "preempted", 2)
        assert [row.request for row in planned(state, group).rows] == [first]
        assert newer.state is RequestState.WAITING
