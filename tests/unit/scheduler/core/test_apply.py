"""What a result changes, whatever a worker answers, in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libs.errors import ErrorCode
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.plan import BatchOutcome, Delta, RowOutcome, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.quarantine import CRASHES_ALONE
from services.scheduler.core.request import CancelReason, Request, RequestState
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import TOKEN, failed, not_run, ok, planned, shape, step, submit


@pytest.fixture
def state() -> SchedulerState:
    return make_state(max_tokens_per_step=64)


@pytest.fixture
def group(state: SchedulerState) -> Group:
    return add_group(state, in_flight=3)


def error_of(request: Request) -> ErrorCode:
    assert request.ending is not None
    assert request.ending.error is not None
    return request.ending.error.code


class TestTokens:
    def test_a_delta_carries_the_index_of_its_first_token(self, state: SchedulerState, group: Group):
        request = submit(state, [1])
        deltas = [step(state, group)[1].deltas for _ in range(2)]
        assert deltas == [[Delta(request, 0, [TOKEN])], [Delta(request, 1, [TOKEN])]]
        assert request.output_ids == [TOKEN, TOKEN]

    def test_a_chunk_that_samples_nothing_gives_no_delta(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 100)
        assert step(state, group)[1].deltas == []
        assert request.residency is not None
        assert request.residency.computed == 64

    def test_the_last_token_and_the_ending_come_together(self, state: SchedulerState, group: Group):
        request = submit(state, [1], max_tokens=1)
        effects = step(state, group)[1]
        assert (effects.deltas, effects.ended) == ([Delta(request, 0, [TOKEN])], [request])
        assert group.ledger.in_use == 0

    def test_tokens_behind_a_stop_in_the_same_row_are_cut_off(self, state: SchedulerState, group: Group):
        request = submit(state, [1], max_tokens=2)
        batch = planned(state, group)
        outcome = replace(ok(batch), tokens=[[TOKEN]])
        apply(state, group, outcome, 1)
        ahead = planned(state, group)
        assert apply(state, group, ok(ahead), 2).ended == [request]
        assert request.output_ids == [TOKEN, TOKEN]

    def test_a_row_sent_ahead_of_an_ending_is_ignored(self, state: SchedulerState, group: Group):
        first = submit(state, [1])
        second = submit(state, [2])
        batch, ahead = planned(state, group), planned(state, group)
        apply(state, group, ok(batch), 1)
        state.cancel(first.key, CancelReason.CLIENT_DISCONNECTED, 1)
        effects = apply(state, group, ok(ahead), 2)
        assert [delta.request for delta in effects.deltas] == [second]
        state.check()

    def test_instants_of_the_first_and_the_last_token_are_kept(self, state: SchedulerState, group: Group):
        request = submit(state, [1], max_tokens=2)
        step(state, group, 10)
        step(state, group, 20)
        line = request.timeline
        assert (line.dispatched_ns, line.first_token_ns, line.last_token_ns, line.ended_ns) == (10, 10, 20, 20)

    def test_device_time_of_every_step_counts_for_each_of_its_requests(self, state: SchedulerState, group: Group):
        requests = [submit(state, [1]), submit(state, [2])]
        apply(state, group, ok(planned(state, group), device_us=300), 1)
        assert [request.timeline.device_us for request in requests] == [300, 300]


class TestRowOutcomes:
    @pytest.mark.parametrize(
        ("outcome", "code"),
        [
            (RowOutcome.DEAD_END, ErrorCode.DEAD_END),
            (RowOutcome.NON_FINITE, ErrorCode.NON_FINITE),
            (RowOutcome.FAILED, ErrorCode.STEP_FAILED),
        ],
    )
    def test_a_failed_row_ends_its_request_and_no_other(self, state: SchedulerState, group: Group, outcome: RowOutcome, code: ErrorCode):
        bad, good = submit(state, [1]), submit(state, [2])
        batch = planned(state, group)
        effects = apply(state, group, replace(ok(batch, rows=[outcome, RowOutcome.OK]), tokens=[[], [TOKEN]]), 1)
        assert (effects.ended, error_of(bad)) == ([bad], code)
        assert good.output_ids == [TOKEN]
        assert state.counters.failed == 1

    def test_the_error_of_a_dead_end_says_why_where_the_worker_knows(self, state: SchedulerState, group: Group):
        told, untold = submit(state, [1]), submit(state, [2])
        rows = ok(planned(state, group), rows=[RowOutcome.DEAD_END] * 2)
        apply(state, group, replace(rows, tokens=[[], []], dead_ends={0: "a mask took too long"}), 1)
        assert told.ending is not None
        assert untold.ending is not None
        assert str(told.ending.error) == "the constraint can go no further: a mask took too long"
        assert "no token is left to sample" in str(untold.ending.error)

    def test_a_completed_constraint_ends_with_the_token_that_completed_it(self, state: SchedulerState, group: Group):
        request = submit(state, [1])
        effects = apply(state, group, ok(planned(state, group), rows=[RowOutcome.CONSTRAINT_COMPLETE]), 1)
        assert effects.deltas == [Delta(request, 0, [TOKEN])]
        assert request.ending is not None
        assert request.ending.reason is FinishReason.CONSTRAINT_COMPLETE

    def test_a_stop_wins_over_a_completed_constraint_at_the_same_token(self, state: SchedulerState, group: Group):
        request = submit(state, [1], max_tokens=1)
        apply(state, group, ok(planned(state, group), rows=[RowOutcome.CONSTRAINT_COMPLETE]), 1)
        assert request.ending is not None
        assert request.ending.reason is FinishReason.LENGTH
        state.check()

    def test_a_row_that_did_not_run_is_replayed(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        step(state, group)
        apply(state, group, replace(ok(planned(state, group), rows=[RowOutcome.NOT_RUN]), tokens=[[]]), 1)
        assert request.state is RequestState.WAITING
        batch = planned(state, group)
        assert shape(batch) == [(1, 0, 5, True)]
        assert batch.opens[0].request.output_ids == [TOKEN]

    def test_what_follows_a_row_that_did_not_run_means_nothing(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        batch, ahead = planned(state, group), planned(state, group)
        apply(state, group, replace(ok(batch, rows=[RowOutcome.NOT_RUN]), tokens=[[]]), 1)
        effects = apply(state, group, ok(ahead, token=9), 2)
        assert effects.deltas == []
        assert request.output_ids == []
        assert shape(planned(state, group)) == [(1, 0, 4, True)]
        state.check()

    @pytest.mark.parametrize("tokens", [[], [TOKEN, TOKEN]])
    def test_a_wrong_number_of_tokens_is_the_workers_fault(self, state: SchedulerState, group: Group, tokens: list[int]):
        request = submit(state, [1])
        apply(state, group, replace(ok(planned(state, group)), tokens=[tokens]), 1)
        assert error_of(request) is ErrorCode.PROTOCOL_VIOLATION
        state.check()

    @pytest.mark.parametrize("outcome", [RowOutcome.FAILED, RowOutcome.NON_FINITE, RowOutcome.NOT_RUN])
    def test_blocks_of_a_row_that_was_not_computed_are_never_hit(self, state: SchedulerState, group: Group, outcome: RowOutcome):
        submit(state, [1] * 40, max_tokens=1)
        batch = planned(state, group)
        apply(state, group, replace(ok(batch, rows=[outcome]), tokens=[[]]), 1)
        assert group.ledger.cached == 0
        again = submit(state, [1] * 40, max_tokens=1)
        assert next(row for row in planned(state, group).rows if row.request in (again, *state.requests.values())).start == 0

    def test_blocks_of_chunks_behind_a_failed_one_are_never_hit(self, state: SchedulerState, group: Group):
        submit(state, [1] * 100, max_tokens=1)
        batch, ahead = planned(state, group), planned(state, group)
        apply(state, group, replace(ok(batch, rows=[RowOutcome.FAILED]), tokens=[[]]), 1)
        apply(state, group, ok(ahead), 2)
        assert (group.ledger.cached, group.ledger.available) == (0, 8)


class TestLateAndForeign:
    def test_a_result_that_comes_twice_counts_once(self, state: SchedulerState, group: Group):
        request = submit(state, [1])
        batch = planned(state, group)
        apply(state, group, ok(batch), 1)
        assert apply(state, group, ok(batch), 2).deltas == []
        assert (request.output_ids, state.counters.stale_results) == ([TOKEN], 1)

    def test_a_result_of_another_epoch_is_ignored(self, state: SchedulerState, group: Group):
        submit(state, [1])
        batch = planned(state, group)
        apply(state, group, replace(ok(batch), epoch=99), 1)
        assert (state.counters.stale_results, len(group.in_flight)) == (1, 1)

    def test_a_result_that_overtakes_an_earlier_one_is_ignored(self, state: SchedulerState, group: Group):
        submit(state, [1])
        first, second = planned(state, group), planned(state, group)
        apply(state, group, ok(second), 1)
        assert state.counters.stale_results == 1
        apply(state, group, ok(first), 2)
        assert list(group.in_flight) == [second]

    def test_a_row_is_resolved_through_its_plan_though_its_slot_was_given_away(self, state: SchedulerState):
        group = add_group(state, slots=1)
        first = submit(state, [1])
        batch = planned(state, group)
        state.cancel(first.key, CancelReason.CLIENT_DISCONNECTED, 1)
        second = submit(state, [2])
        ahead = planned(state, group)
        assert ahead.rows[0].residency.slot == batch.rows[0].residency.slot
        assert apply(state, group, ok(batch, token=3), 2).deltas == []
        assert apply(state, group, ok(ahead, token=4), 3).deltas == [Delta(second, 0, [4])]


class TestFailedBatch:
    def test_its_requests_are_replayed_from_their_confirmed_tokens(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        step(state, group)
        batch = planned(state, group)
        assert apply(state, group, failed(batch), 2).deltas == []
        assert (request.state, request.unresolved, group.ledger.in_use) == (RequestState.WAITING, 0, 0)
        replay = planned(state, group)
        assert (shape(replay), replay.predecessor) == ([(1, 0, 5, True)], 0)

    def test_nothing_happens_before_all_batches_behind_it_have_reported(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        batch, ahead = planned(state, group), planned(state, group)
        apply(state, group, failed(batch), 2)
        assert request.state is RequestState.RUNNING
        apply(state, group, not_run(ahead), 3)
        assert request.state is RequestState.WAITING
        state.check()

    def test_what_a_worker_claims_behind_a_failed_batch_is_not_believed(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        batch, ahead = planned(state, group), planned(state, group)
        apply(state, group, failed(batch), 2)
        assert apply(state, group, ok(ahead), 3).deltas == []
        assert request.output_ids == []
        assert list(state.quarantine.suspects) == [request]

    @pytest.mark.parametrize("spoil", ["rows", "tokens"])
    def test_a_result_of_the_wrong_size_is_a_failed_batch(self, state: SchedulerState, group: Group, spoil: str):
        request = submit(state, [1] * 4)
        batch = planned(state, group)
        apply(state, group, replace(ok(batch), **{spoil: []}), 2)
        assert request.state is RequestState.WAITING

    def test_a_batch_that_was_not_run_accuses_nobody(self, state: SchedulerState, group: Group):
        submit(state, [1])
        apply(state, group, not_run(planned(state, group)), 2)
        assert not state.quarantine.suspects

    def test_only_the_requests_of_the_failed_batch_are_suspects(self, state: SchedulerState, group: Group):
        first = submit(state, [1])
        batch = planned(state, group)
        submit(state, [2])
        ahead = planned(state, group)
        apply(state, group, failed(batch), 2)
        apply(state, group, failed(ahead), 3)
        assert list(state.quarantine.suspects) == [first]

    def test_a_request_that_always_breaks_its_batch_is_found_and_ends_alone(self, state: SchedulerState, group: Group):
        everyone = [submit(state, [number], max_tokens=3) for number in range(1, 9)]
        bad, breaks = everyone[5], 0
        for _ in range(200):
            batch = plan(state, group, 2)
            if batch is None:
                break
            is_bad = any(row.request is bad for row in batch.rows)
            breaks += is_bad
            apply(state, group, failed(batch) if is_bad else ok(batch), 3)
        assert error_of(bad) is ErrorCode.POISON_REQUEST
        assert [request.ending.reason for request in everyone if request is not bad and request.ending] == [FinishReason.LENGTH] * 7
        assert breaks == 3 + CRASHES_ALONE  # halves of 8, 4 and 2, then alone

    def test_a_cancelled_suspect_stays_ended(self, state: SchedulerState, group: Group):
        request = submit(state, [1])
        batch = planned(state, group)
        state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 2)
        assert apply(state, group, failed(batch), 2).ended == []
        assert not state.quarantine.suspects
        state.check()


class TestLostGroup:
    def test_its_requests_wait_for_another_with_what_they_have(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        step(state, group)
        planned(state, group)
        assert lose_group(state, group, 3, crashed=False).ended == []
        assert (request.state, request.unresolved, state.groups) == (RequestState.WAITING, 0, {})
        assert request.timeline.events[-1].name == "migrated"
        other = add_group(state, "g1")
        assert shape(planned(state, other)) == [(1, 0, 5, True)]

    def test_only_the_batch_that_ran_is_suspect(self, state: SchedulerState, group: Group):
        first = submit(state, [1])
        planned(state, group)
        submit(state, [2])
        planned(state, group)
        lose_group(state, group, 3, crashed=True)
        assert list(state.quarantine.suspects) == [first]

    @pytest.mark.parametrize("in_flight", [False, True])
    def test_a_worker_that_leaves_in_peace_accuses_nobody(self, state: SchedulerState, group: Group, in_flight: bool):
        submit(state, [1])
        if in_flight:
            planned(state, group)
        lose_group(state, group, 3, crashed=not in_flight)
        assert not state.quarantine.suspects

    def test_a_preempted_request_whose_rows_were_lost_can_be_admitted_again(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 4)
        planned(state, group)
        state.requeue(request, "preempted", 2)
        lose_group(state, group, 3, crashed=True)
        other = add_group(state, "g1")
        assert shape(planned(state, other)) == [(1, 0, 4, True)]

    def test_a_request_that_kills_its_worker_again_and_again_is_poison(self, state: SchedulerState):
        request = submit(state, [1])
        for epoch in range(1, CRASHES_ALONE + 1):
            group = add_group(state, epoch=epoch)
            planned(state, group)
            ended = lose_group(state, group, epoch, crashed=True).ended
        assert ended == [request]
        assert error_of(request) is ErrorCode.POISON_REQUEST
        state.check()


class TestPublishing:
    def test_prompt_blocks_can_be_hit_once_their_batch_succeeded(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 33)
        batch = planned(state, group)
        assert not group.ledger.lookup(request.block_names).blocks
        apply(state, group, ok(batch), 1)
        assert len(group.ledger.lookup(request.block_names).blocks) == 2

    def test_a_prompt_cancelled_in_flight_still_fills_the_cache(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 33)
        batch = planned(state, group)
        state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
        apply(state, group, ok(batch), 1)
        assert (group.ledger.cached, group.ledger.in_use) == (2, 0)

    def test_generated_blocks_are_named_once_they_are_full_of_confirmed_tokens(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 16, max_tokens=30)
        for _ in range(17):
            step(state, group)
        assert len(request.block_names) == 2
        assert len(group.ledger.lookup(request.block_names).blocks) == 2

    def test_a_prompt_shorter_than_a_block_has_no_chain_to_extend(self, state: SchedulerState, group: Group):
        request = submit(state, [1] * 8, max_tokens=30)
        batches: list[StepPlan] = [step(state, group)[0] for _ in range(20)]
        assert len(batches) == 20
        assert request.block_names == []


def test_an_unknown_batch_outcome_counts_as_a_failure(state: SchedulerState, group: Group):
    request = submit(state, [1])
    apply(state, group, replace(ok(planned(state, group)), outcome=BatchOutcome.FAILED), 1)
    assert list(state.quarantine.suspects) == [request]
