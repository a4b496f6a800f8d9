"""The counters of the prefix cache: every prompt of an HTTP request once, and equal to what the clients are told."""

from __future__ import annotations

from services.scheduler.core.apply import lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.request import CancelReason, Request, RequestState
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import step, submit

PROMPT = [3] * 40


def counts(state: SchedulerState) -> tuple[int, int]:
    return state.counters.prefix_queries, state.counters.prefix_hits


def served(state: SchedulerState, group: Group, prompt: list[int], **fields: object) -> Request:
    request = submit(state, prompt, **fields)  # type: ignore[arg-type]
    while request.state is not RequestState.ENDED:
        step(state, group)
    return request


def test_the_first_admission_counts_and_no_other_one_does():
    state = make_state(max_tokens_per_step=64)
    group = add_group(state)
    served(state, group, PROMPT)
    request = submit(state, PROMPT)
    step(state, group)
    for why in ("preempted", "batch_failed", "not_run"):
        state.requeue(request, why, 2)
        step(state, group)
    lose_group(state, group, 3, crashed=False)
    group = add_group(state)
    step(state, group)
    assert request.cached_tokens == 32
    assert counts(state) == (80, 32)


def test_short_prompts_are_queried_too_and_what_never_ran_is_not():
    state = make_state()
    group = add_group(state, slots=1)
    served(state, group, [1] * 5)
    submit(state, [2] * 20)
    waiting = submit(state, [3] * 20)
    step(state, group)
    state.cancel(waiting.key, CancelReason.CLIENT_DISCONNECTED, 1)
    assert counts(state) == (25, 0)


def test_further_choices_are_not_look_ups():
    state = make_state(max_tokens_per_step=64)
    group = add_group(state, blocks=16)
    served(state, group, PROMPT)
    parent = submit(state, PROMPT)
    children = [submit(state, PROMPT, parent=parent) for _ in range(3)]
    orphan = submit(state, PROMPT, parent=served(state, group, [1]))
    while state.requests:
        step(state, group)
    assert counts(state) == (40 + 40 + 1, 32)
    assert [request.cached_tokens for request in (parent, *children, orphan)] == [32, 0, 0, 0, 0]
    assert state.counters.sibling_shared == 4 * 32


class TestAttempts:
    """A session was lost; the gateway hands the request over again."""

    def again(self, state: SchedulerState, request: Request, *, attempt: int = 1) -> Request:
        state.cancel(request.key, CancelReason.SESSION_LOST, 1)
        return submit(state, request.prompt_ids, number=request.key.id, attempt=attempt, outputs=request.output_ids)

    def test_an_attempt_after_one_that_was_counted_tells_the_client_that_ones_number(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        first = submit(state, PROMPT)
        step(state, group)
        second = self.again(state, first)
        third = self.again(state, second, attempt=2)
        step(state, group)
        assert third.cached_tokens == 0  # although its blocks were found: they are its own
        assert third.timeline.chunks == 1
        assert counts(state) == (40, 0)

    def test_hits_of_the_lost_attempt_are_not_lost(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        served(state, group, PROMPT)
        first = submit(state, PROMPT)
        step(state, group)
        second = self.again(state, first)
        while state.requests:
            step(state, group)
        assert second.cached_tokens == 32
        assert counts(state) == (80, 32)

    def test_an_attempt_after_one_that_never_ran_is_counted(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        served(state, group, PROMPT)
        second = self.again(state, submit(state, PROMPT))
        step(state, group)
        assert second.cached_tokens == 32
        assert counts(state) == (80, 32)

    def test_another_schedulers_attempt_is_counted_where_it_arrives(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        served(state, group, PROMPT)
        resumed = submit(state, PROMPT, attempt=3, outputs=[5, 5])
        step(state, group)
        assert resumed.cached_tokens == 32
        assert counts(state) == (80, 32)

    def test_the_counts_of_four_times_as_many_are_remembered_as_may_live_and_the_oldest_go_first(self):
        state = make_state(max_tokens_per_step=64, max_requests=2)
        group = add_group(state)
        ended = [served(state, group, PROMPT) for _ in range(9)]
        assert list(state._counted) == [request.key for request in ended[1:]]

    def test_an_attempt_after_a_finished_one_whose_ending_was_lost_is_not_counted_again(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        served(state, group, PROMPT)
        first = served(state, group, PROMPT)
        for attempt in (1, 2):  # the second one's ending is lost too
            again = submit(state, PROMPT, number=first.key.id, attempt=attempt, outputs=first.output_ids[:1])
            while state.requests:
                step(state, group)
            assert (again.cached_tokens, counts(state)) == (32, (80, 32))

    def test_a_first_attempt_is_counted_whatever_bore_its_name_before(self):
        state = make_state(max_tokens_per_step=64)
        group = add_group(state)
        first = served(state, group, PROMPT)
        served(state, group, PROMPT, number=first.key.id)
        assert counts(state) == (80, 32)
