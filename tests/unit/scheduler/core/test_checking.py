"""Requests whose constraint is being compiled: where they stand, when they enter the queue, when they fail, what a loss does to them."""

from __future__ import annotations

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.checks import PATIENCE_NS
from services.scheduler.core.group import Group
from services.scheduler.core.plan import Effects, RowOutcome
from services.scheduler.core.planner import plan
from services.scheduler.core.preparing import expire, orders, prepared
from services.scheduler.core.request import CancelReason, Request, RequestState, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.core import add_group, make_request, make_state
from tests.support.model_constraints import multiples
from tests.unit.scheduler.core.outcomes import failed, ok, planned, step, submit

THREES, SEVENS = multiples(3, 5), multiples(7, 5)
INVALID = TokenloomError(ErrorCode.INVALID_CONSTRAINT, "no such schema", param="the first one's")
BUSY = TokenloomError(ErrorCode.CONSTRAINT_BUSY, "later", retry_after_ms=500)


def answer(state: SchedulerState, group: Group, error: TokenloomError | None = None, now: int = 10) -> Effects:
    """The group is told what to compile, and answers all of it alike."""
    effects = Effects()
    for ask in orders(state, group, now).prepares:
        heard, more = prepared(state, group, ask.id, error, now)
        assert heard is not None
        effects.ended += more.ended
    state.check()
    return effects


def error_of(request: Request) -> TokenloomError:
    assert request.ending is not None
    assert request.ending.error is not None
    return request.ending.error


def test_a_request_is_checked_before_it_queues_and_holds_nothing_meanwhile():
    state = make_state()
    group = add_group(state)
    request, other = submit(state, [1], constraint=THREES), submit(state, [2])
    assert (request.state, request.wait_reason) == (RequestState.CHECKING, WaitReason.CHECKING)
    assert (list(state.queue), list(state.checking), state.live_tokens) == ([other], [request], 18)
    batch, _ = step(state, group)
    assert [row.request for row in batch.rows] == [other]
    answer(state, group)
    assert (request.state, request.wait_reason) == (RequestState.WAITING, WaitReason.NEW)
    (entry,) = planned(state, group).opens
    assert (entry.request, entry.constraint) == (request, 1)


def test_a_request_without_a_constraint_names_none():
    state = make_state()
    group = add_group(state)
    submit(state, [1])
    assert [entry.constraint for entry in planned(state, group).opens] == [0]


def test_a_constraint_that_is_ready_lets_the_next_one_queue_at_once():
    state = make_state()
    group = add_group(state)
    submit(state, [1], constraint=THREES)
    answer(state, group)
    assert submit(state, [2], constraint=THREES).state is RequestState.WAITING
    assert submit(state, [3], constraint=SEVENS).state is RequestState.CHECKING


def test_requests_share_one_copy_of_a_constraints_text_and_keep_their_own_parameter():
    state = make_state()
    add_group(state)
    first, second = (submit(state, [1], constraint=multiples(3, 5, param=param)) for param in ("a", "b"))
    assert first.constraint is not None
    assert second.constraint is not None
    assert second.constraint.text is first.constraint.text
    assert (first.constraint.param, second.constraint.param) == ("a", "b")


def test_a_refusal_ends_all_who_wait_for_it_and_names_the_parameter_of_each():
    state = make_state()
    group = add_group(state)
    requests = [submit(state, [1], constraint=multiples(3, 5, param=param)) for param in ("response_format", "guided_regex")]
    other = submit(state, [1], constraint=SEVENS)
    (first, _) = orders(state, group, 1).prepares
    heard, effects = prepared(state, group, first.id, INVALID, 10)
    assert heard is not None
    assert effects.ended == requests
    assert [(error_of(request).message, error_of(request).param) for request in requests] == [
        ("no such schema", "response_format"),
        ("no such schema", "guided_regex"),
    ]
    assert other.state is RequestState.CHECKING
    assert state.counters.failed == 2
    state.check()


def test_what_was_refused_a_moment_ago_ends_the_next_one_with_its_acceptance():
    state = make_state()
    group = add_group(state)
    submit(state, [1], constraint=THREES)
    answer(state, group, INVALID)
    request = make_request(state, [1], constraint=THREES)
    assert state.accept(request).ended == [request]
    assert error_of(request).code is ErrorCode.INVALID_CONSTRAINT
    state.check()


def test_of_groups_that_disagree_the_one_that_has_it_runs_the_request_and_the_other_lets_it_pass():
    state = make_state()
    able, unable = add_group(state, "able"), add_group(state, "unable")
    request, other = submit(state, [1], constraint=THREES), submit(state, [2])
    assert answer(state, unable, INVALID).ended == []
    assert request.state is RequestState.CHECKING
    answer(state, able)
    batch = planned(state, unable)
    assert [row.request for row in batch.rows] == [other]
    assert (request.state, request.wait_reason) == (RequestState.WAITING, WaitReason.CHECKING)
    assert [row.request for row in planned(state, able).rows] == [request]


def test_only_groups_that_can_hold_a_request_decide_about_it():
    state = make_state()
    small, large = add_group(state, "small", blocks=2), add_group(state, "large", blocks=8)
    request = submit(state, [1] * 40, constraint=THREES)
    answer(state, small)
    assert request.state is RequestState.CHECKING
    assert answer(state, large, INVALID).ended == [request]


def test_a_busy_group_fails_the_new_and_is_asked_again_for_who_resumes():
    state = make_state()
    group = add_group(state)
    new, resumed = submit(state, [1], constraint=THREES), submit(state, [2], constraint=THREES, attempt=1, outputs=[3])
    assert answer(state, group, BUSY).ended == [new]
    assert (error_of(new).code, error_of(new).retry_after_ms) == (ErrorCode.CONSTRAINT_BUSY, 500)
    assert resumed.state is RequestState.CHECKING
    assert orders(state, group, 20).prepares == []
    assert expire(state, PATIENCE_NS).ended == []
    answer(state, group, now=PATIENCE_NS)
    assert resumed.state is RequestState.WAITING


def test_an_answer_that_is_owed_for_too_long_ends_even_who_resumes():
    state = make_state()
    group = add_group(state)
    request = submit(state, [2], constraint=THREES, attempt=1)
    orders(state, group, 10)
    assert expire(state, 9 + PATIENCE_NS).ended == []
    assert expire(state, 10 + PATIENCE_NS).ended == [request]
    assert (error_of(request).code, state.counters.unanswered_prepares) == (ErrorCode.CONSTRAINT_BUSY, 1)
    state.check()


def test_a_late_answer_is_counted_and_ignored():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1], constraint=THREES)
    (ask,) = orders(state, group, 1).prepares
    prepared(state, group, ask.id, None, 2)
    assert prepared(state, group, ask.id, INVALID, 3) == (None, Effects())
    assert (request.state, state.counters.stale_prepared) == (RequestState.WAITING, 1)


def test_children_wait_for_their_parent_and_are_checked_with_it():
    state = make_state()
    group = add_group(state)
    parent = submit(state, [1] * 20, constraint=THREES)
    child = submit(state, [1] * 20, constraint=THREES, parent=parent)
    assert (child.state, child.wait_reason) == (RequestState.WAITING, WaitReason.PARENT_PROMPT)
    answer(state, group)
    assert child.wait_reason is WaitReason.PARENT_PROMPT
    step(state, group)
    assert [entry.request for entry in planned(state, group).opens] == [child]


def test_children_of_a_refused_parent_fail_with_it():
    state = make_state()
    group = add_group(state)
    parent = submit(state, [1] * 20, constraint=THREES)
    children = [submit(state, [1] * 20, constraint=THREES, parent=parent) for _ in range(2)]
    assert answer(state, group, INVALID).ended == [parent, *children]
    assert not state.requests


@pytest.mark.parametrize("reason", [CancelReason.CLIENT_DISCONNECTED, CancelReason.SESSION_LOST, CancelReason.TIMEOUT])
def test_a_request_that_is_checked_can_be_cancelled(reason: CancelReason):
    state = make_state()
    add_group(state)
    request = submit(state, [1], constraint=THREES)
    assert state.cancel(request.key, reason, 5).ended == [request]
    assert (len(state.checking), state.live_tokens) == (0, 0)
    state.check()


def test_a_request_that_is_checked_passes_its_deadline():
    state = make_state()
    add_group(state)
    request = submit(state, [1], constraint=THREES, deadline_ns=50)
    assert state.expire(50).ended == [request]
    state.check()


def test_without_any_group_it_waits_for_one_and_then_for_its_answer():
    state = make_state()
    request = submit(state, [1], constraint=THREES)
    assert (request.state, request.wait_reason) == (RequestState.CHECKING, WaitReason.NO_WORKER)
    group = add_group(state)
    state.wait_all(WaitReason.BEHIND, 5)
    state.shelve_unfit(5)
    assert request.wait_reason is WaitReason.CHECKING
    answer(state, group)
    assert request.state is RequestState.WAITING


def test_whose_only_ready_group_is_lost_goes_back_to_being_checked():
    state = make_state()
    group = add_group(state, "a")
    running = submit(state, [1], constraint=THREES)
    answer(state, group)
    step(state, group)
    waiting = submit(state, [2], constraint=THREES)
    other = add_group(state, "b")
    lose_group(state, group, 20, crashed=False)
    assert [(request.state, request.wait_reason) for request in (running, waiting)] == [(RequestState.CHECKING, WaitReason.CHECKING)] * 2
    state.check()
    answer(state, other)
    assert {entry.request for entry in planned(state, other).opens} == {running, waiting}
    state.check()


def test_a_request_that_only_the_lost_group_could_still_have_taken_fails_with_what_the_others_said():
    state = make_state()
    a, b = add_group(state, "a"), add_group(state, "b")
    request = submit(state, [1], constraint=THREES)
    answer(state, b, INVALID)
    assert lose_group(state, a, 20, crashed=False).ended == [request]
    assert error_of(request).code is ErrorCode.INVALID_CONSTRAINT
    state.check()


def test_what_fits_no_group_any_more_waits_for_a_larger_one_and_is_checked_there():
    state = make_state()
    large = add_group(state, "large", blocks=8)
    request = submit(state, [1] * 40, constraint=THREES)
    add_group(state, "small", blocks=2)
    lose_group(state, large, 20, crashed=False)
    assert (request.state, request.wait_reason) == (RequestState.WAITING, WaitReason.GROUP_TOO_SMALL)
    assert state.shelve_unfit(21)
    again = add_group(state, "large", epoch=2, blocks=8)
    assert not state.shelve_unfit(22)
    assert request.state is RequestState.CHECKING
    answer(state, again)
    assert [row.request for row in planned(state, again).rows] == [request]


def test_suspects_are_isolated_where_what_they_need_is_compiled():
    state = make_state()
    able, unable = add_group(state, "z"), add_group(state, "a")
    suspect = submit(state, [1], constraint=THREES)
    answer(state, able)
    answer(state, unable, INVALID)
    apply(state, able, failed(planned(state, able)), 5)
    assert suspect in state.quarantine.suspects
    assert (state.is_isolated(able), state.is_isolated(unable)) == (True, False)
    assert plan(state, unable, 6) is None
    assert [row.request for row in planned(state, able).rows] == [suspect]


def test_a_complete_constraint_ends_its_request_before_min_tokens_and_keeps_the_token():
    state = make_state()
    group = add_group(state)
    request = make_request(state, [1], SamplingParams(max_tokens=8, min_tokens=8))
    state.accept(request)
    batch = planned(state, group)
    effects = apply(state, group, ok(batch, rows=[RowOutcome.CONSTRAINT_COMPLETE]), 5)
    assert (effects.ended, request.output_ids) == ([request], [5])
    assert request.ending is not None
    assert request.ending.reason is FinishReason.CONSTRAINT_COMPLETE


def test_a_row_in_flight_behind_a_completed_one_is_dropped():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1])
    first = planned(state, group)
    second = planned(state, group)
    apply(state, group, ok(first, rows=[RowOutcome.CONSTRAINT_COMPLETE]), 5)
    effects = apply(state, group, ok(second, rows=[RowOutcome.DEAD_END]), 6)
    assert (effects.deltas, effects.ended, request.output_ids) == ([], [], [5])
    state.check()
