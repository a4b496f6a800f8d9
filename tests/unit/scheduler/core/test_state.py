"""The verbs that move one request, and what always adds up."""

from __future__ import annotations

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.ledger import LedgerError
from services.scheduler.core.plan import Effects
from services.scheduler.core.request import CancelReason, Ending, RequestKey, RequestState, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.core import add_group, make_request, make_state
from tests.unit.scheduler.core.outcomes import ok, planned, step, submit


def cancel(state: SchedulerState, number: int, reason: CancelReason = CancelReason.CLIENT_DISCONNECTED, now: int = 9) -> Effects:
    return state.cancel(RequestKey(7, number), reason, now)


def test_an_accepted_request_waits_and_is_counted():
    state = make_state()
    request = submit(state, [1, 2])
    assert (state.counters.admitted, len(state.queue), state.running) == (1, 1, 0)
    assert (request.state, request.wait_reason) == (RequestState.WAITING, WaitReason.NEW)
    state.check()


def test_a_full_scheduler_refuses_and_says_when_to_come_back():
    state = make_state(max_requests=1)
    submit(state, [1])
    with pytest.raises(TokenloomError) as caught:
        submit(state, [2])
    assert (caught.value.code, caught.value.retry_after_ms) == (ErrorCode.QUEUE_FULL, 1000)
    assert state.counters.admitted == 1
    state.check()


def test_a_resumed_request_enters_a_full_scheduler():
    state = make_state(max_requests=1)
    submit(state, [1])
    resumed = make_request(state, [2])
    resumed.attempt = 1
    state.accept(resumed)
    assert len(state.queue) == 2


def test_a_prompt_that_leaves_no_room_for_output_is_refused_with_both_numbers():
    state = make_state()
    with pytest.raises(TokenloomError, match=r"128 tokens.*128") as caught:
        submit(state, [1] * 128)
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG
    assert not state.requests


def test_a_prompt_that_leaves_room_for_one_token_is_served():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1] * 127)
    while request.state is not RequestState.ENDED:
        step(state, group)
    assert len(request.output_ids) == 1


def test_a_request_that_no_worker_can_hold_is_refused():
    state = make_state()
    add_group(state, blocks=2)
    submit(state, [1] * 30, max_tokens=3)  # the last token's KV is never written
    with pytest.raises(TokenloomError) as caught:
        submit(state, [1] * 30, max_tokens=4)
    assert caught.value.code is ErrorCode.CANNOT_FIT


def test_without_a_worker_nobody_knows_what_fits_and_the_request_is_queued():
    state = make_state()
    submit(state, [1] * 100)
    assert state.capacity_tokens() is None


def test_the_largest_worker_decides_what_fits():
    state = make_state()
    add_group(state, "g0", blocks=3)
    add_group(state, "g1", blocks=4)
    submit(state, [1] * 60, max_tokens=5)
    with pytest.raises(TokenloomError, match="need 66 tokens of KV cache; a worker holds 64") as caught:
        submit(state, [1] * 60, max_tokens=6)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CANNOT_FIT, "max_tokens")


def test_requests_that_no_worker_that_is_left_can_hold_end_when_asked_for():
    state = make_state()
    large, small = submit(state, [1] * 60, max_tokens=5), submit(state, [1] * 5)
    assert state.fail_unfit(1).ended == []  # without a worker nobody knows
    add_group(state, blocks=3)
    assert state.fail_unfit(2).ended == [large]
    assert large.ending is not None
    assert large.ending.error is not None
    assert large.ending.error.code is ErrorCode.CANNOT_FIT
    assert small.state is RequestState.WAITING
    state.check()


class TestCancel:
    def test_a_waiting_request_leaves_the_queue(self):
        state = make_state()
        request = submit(state, [1])
        assert cancel(state, 1).ended == [request]
        assert (len(state.queue), state.counters.cancelled) == (0, 1)
        state.check()

    def test_a_running_request_gives_everything_back(self):
        state = make_state()
        group = add_group(state, slots=1)
        request = submit(state, [1] * 40)
        step(state, group)
        cancel(state, 1)
        assert (request.state, request.residency) == (RequestState.ENDED, None)
        assert (group.free_slots, group.ledger.in_use, group.running) == ([0], 0, [])
        state.check()

    def test_a_request_in_flight_gives_its_blocks_back_when_its_batches_are_over(self):
        state = make_state()
        group = add_group(state)
        submit(state, [1] * 20)
        batch = planned(state, group)
        cancel(state, 1)
        assert (group.ledger.in_use, group.ledger.draining) == (0, 2)
        assert apply(state, group, ok(batch), 9).deltas == []
        assert group.ledger.available == 8
        state.check()

    def test_a_preempted_request_whose_rows_are_in_flight_ends_once(self):
        state = make_state()
        group = add_group(state)
        request = submit(state, [1] * 20)
        batch = planned(state, group)
        state.requeue(request, "preempted", 2)
        cancel(state, 1)
        assert not apply(state, group, ok(batch), 9).ended
        assert state.counters.cancelled == 1
        state.check()

    def test_an_ended_request_is_unknown(self):
        state = make_state()
        submit(state, [1])
        cancel(state, 1)
        assert cancel(state, 1).ended == []
        assert (state.counters.unknown_cancels, state.counters.cancelled) == (1, 1)

    def test_an_unknown_request_is_counted_and_ignored(self):
        state = make_state()
        assert cancel(state, 99).ended == []
        assert state.counters.unknown_cancels == 1

    def test_a_timeout_of_the_gateway_ends_as_a_deadline(self):
        state = make_state()
        request = submit(state, [1])
        cancel(state, 1, CancelReason.TIMEOUT)
        assert request.ending == Ending(FinishReason.DEADLINE, cancel=CancelReason.TIMEOUT)


class TestDeadlines:
    def test_the_earliest_comes_first(self):
        state = make_state()
        submit(state, [1], deadline_ns=50)
        soon = submit(state, [2], deadline_ns=20)
        assert state.next_deadline_ns == 20
        assert state.expire(19).ended == []
        assert state.expire(20).ended == [soon]
        assert state.next_deadline_ns == 50

    def test_one_pass_ends_all_that_are_over_waiting_or_running(self):
        state = make_state()
        group = add_group(state, slots=1)
        running, waiting = submit(state, [1], deadline_ns=5), submit(state, [2], deadline_ns=6)
        step(state, group)
        assert state.expire(10).ended == [running, waiting]
        assert state.counters.cancelled == 2
        assert group.ledger.in_use == 0
        state.check()

    def test_an_ended_request_has_none(self):
        state = make_state()
        submit(state, [1], deadline_ns=5)
        cancel(state, 1)
        assert state.next_deadline_ns is None
        assert state.expire(100).ended == []

    def test_deadlines_of_ended_requests_are_not_kept_for_hours(self):
        state = make_state()
        for number in range(1, 500):
            submit(state, [1] * 50, deadline_ns=10**15)
            cancel(state, number)
        assert len(state._deadlines) < 10


def test_ending_twice_is_a_bug():
    state = make_state()
    request = submit(state, [1])
    state.finish(request, Ending(FinishReason.STOP), 1, Effects())
    with pytest.raises(ValueError):
        state.finish(request, Ending(FinishReason.STOP), 1, Effects())


def test_each_reason_is_counted_in_its_own_sum():
    state = make_state()
    endings = [
        (FinishReason.STOP, "finished"),
        (FinishReason.LENGTH, "finished"),
        (FinishReason.CONSTRAINT_COMPLETE, "finished"),
        (FinishReason.CANCELLED, "cancelled"),
        (FinishReason.DEADLINE, "cancelled"),
        (FinishReason.FAILED, "failed"),
    ]
    for reason, counter in endings:
        before = getattr(state.counters, counter)
        state.finish(submit(state, [1]), Ending(reason), 1, Effects())
        assert getattr(state.counters, counter) == before + 1
        state.check()


def test_failing_all_ends_the_waiting_and_the_running():
    state = make_state()
    group = add_group(state, slots=1)
    everyone = [submit(state, [1]), submit(state, [2])]
    step(state, group)
    effects = state.fail_all(everyone, TokenloomError(ErrorCode.NO_WORKER, "gone"), 3)
    assert effects.ended == everyone
    assert state.counters.failed == 2
    state.check()


def test_a_requeued_request_keeps_its_tokens_and_its_place():
    state = make_state()
    group = add_group(state)
    first = submit(state, [1, 2, 3])
    step(state, group)
    second = submit(state, [4])
    state.requeue(first, "preempted", 5)
    assert state.queue.peek() is first
    assert first.output_ids
    assert (first.timeline.preemptions, state.counters.preemptions) == (1, 1)
    assert second.state is RequestState.WAITING


def test_a_migrated_request_is_not_counted_as_preempted():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1])
    step(state, group)
    state.requeue(request, "migrated", 5)
    assert state.counters.preemptions == 0


def test_prefix_hits_are_counted_once_at_the_first_admission():
    state = make_state()
    group = add_group(state)
    step(state, group, submit(state, [1] * 33).arrival)
    again = submit(state, [1] * 33)
    step(state, group)
    assert again.cached_tokens == 32
    state.requeue(again, "preempted", 5)
    step(state, group)
    assert (state.counters.prefix_queries, state.counters.prefix_hits) == (66, 32)
    assert state.counters.resumed == 1


def test_why_a_request_waits_is_remembered_for_the_trace_when_it_changes():
    request = submit(make_state(), [1])
    for reason in (WaitReason.NO_SLOT, WaitReason.NO_SLOT, WaitReason.NO_BLOCKS):
        request.wait(reason, 3)
    assert [event.detail for event in request.timeline.events] == ["no_slot", "no_blocks"]


def test_a_transition_that_the_table_does_not_know_is_a_bug():
    request = submit(make_state(), [1])
    request.move(RequestState.RUNNING)
    with pytest.raises(ValueError, match="running -> running"):
        request.move(RequestState.RUNNING)


class TestCheckCatches:
    def test_a_request_in_no_place(self):
        state = make_state()
        state.queue.remove(submit(state, [1]))
        with pytest.raises(ValueError, match="1 live requests in 0 places"):
            state.check()

    def test_an_ending_that_was_not_counted(self):
        state = make_state()
        submit(state, [1])
        state.counters.admitted += 1
        with pytest.raises(ValueError, match="conservation"):
            state.check()

    def test_a_slot_that_is_used_twice(self):
        state = make_state()
        group = add_group(state)
        submit(state, [1])
        step(state, group)
        group.free_slots.append(group.running[0].residency.slot)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="slot"):
            state.check()

    def test_running_requests_out_of_their_order(self):
        state = make_state()
        group = add_group(state)
        submit(state, [1])
        submit(state, [2])
        step(state, group)
        group.running.reverse()
        with pytest.raises(ValueError, match="out of their order"):
            state.check()

    def test_a_block_that_leaked(self):
        state = make_state()
        group = add_group(state)
        group.ledger.allocate(1)
        with pytest.raises(LedgerError):
            state.check()


def test_a_live_request_without_a_sampling_token_is_not_started_beyond_its_length():
    state = make_state()
    request = make_request(state, [1] * 4, SamplingParams(max_tokens=2), outputs=[3])
    state.accept(request)
    group = add_group(state)
    batch = planned(state, group)
    assert [row.sample for row in batch.rows] == [True]
    assert request.remaining == 0


def test_live_requests_are_bounded_in_tokens_too_but_one_alone_is_always_taken() -> None:
    state = make_state(max_live_tokens=50)
    add_group(state)
    params = SamplingParams(max_tokens=40)
    first = make_request(state, [1] * 20, params)
    state.accept(first)
    with pytest.raises(TokenloomError, match="60 tokens, the limit is 50") as refused:
        state.accept(make_request(state, [1] * 2, SamplingParams(max_tokens=1)))
    assert refused.value.code is ErrorCode.QUEUE_FULL
    state.cancel(first.key, CancelReason.CLIENT_DISCONNECTED, 1)
    for _ in range(2):
        state.accept(make_request(state, [1] * 5, SamplingParams(max_tokens=10)))
    assert state.live_tokens == 30
    state.check()


def test_requests_that_come_and_go_while_nobody_plans_are_not_kept():
    state = make_state()
    for _ in range(50):
        request = submit(state, [1])
        state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
    stays = submit(state, [1])
    assert list(state._newcomers) == [stays]
    state.mark_newcomers(2)
    assert stays.wait_reason is WaitReason.BEHIND


def test_who_returns_to_the_queue_waits_for_its_turn_or_its_own_tokens_until_a_plan_says_more():
    state = make_state()
    group = add_group(state)
    first, second = submit(state, [1] * 20), submit(state, [2] * 20)
    planned(state, group)
    state.requeue(first, "preempted", 2, WaitReason.NO_BLOCKS)
    state.requeue(second, "not_run", 2)
    assert (first.wait_reason, second.wait_reason) == (WaitReason.NO_BLOCKS, WaitReason.UNRESOLVED)
    lose_group(state, group, 3, crashed=False)
    group = add_group(state)
    planned(state, group)
    lose_group(state, group, 5, crashed=False)
    assert {first.wait_reason, second.wait_reason} == {WaitReason.BEHIND}
