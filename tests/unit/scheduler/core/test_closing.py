"""Slots whose requests are gone are closed: with the next rows, or alone when no rows are in sight."""

from __future__ import annotations

from services.scheduler.core.apply import apply
from services.scheduler.core.planner import plan
from services.scheduler.core.request import CancelReason
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import ok, planned, step, submit


def test_the_last_request_s_slot_is_closed_by_a_batch_without_rows():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1, 2], max_tokens=1)
    step(state, group)
    assert request.ending is not None
    last = planned(state, group)
    assert (last.rows, last.closes, last.tokens) == ([], [group.free_slots[-1]], 0)
    steps = state.counters.steps
    apply(state, group, ok(last), 1)
    assert plan(state, group, 1) is None, "a slot is closed once"
    assert state.counters.steps == steps, "closing is no step"


def test_a_slot_is_not_closed_alone_while_a_batch_is_in_flight():
    state = make_state()
    group = add_group(state)
    request = submit(state, [1, 2])
    running = planned(state, group)
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert plan(state, group, 1) is None
    apply(state, group, ok(running), 1)
    assert planned(state, group).closes == [group.free_slots[-1]]


def test_closes_ride_with_the_next_rows():
    state = make_state()
    group = add_group(state)
    gone, _ = submit(state, [1, 2], max_tokens=1), submit(state, [3, 4])
    step(state, group)
    assert gone.ending is not None
    batch = planned(state, group)
    assert len(batch.rows) == len(batch.closes) == 1


def test_a_slot_that_is_taken_again_at_once_is_not_closed():
    state = make_state()
    group = add_group(state, slots=1)
    submit(state, [1, 2], max_tokens=1)
    step(state, group)
    submit(state, [3, 4])
    batch = planned(state, group)
    assert (len(batch.opens), batch.closes) == (1, [])
