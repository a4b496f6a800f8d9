"""A worker that runs out of memory gets smaller steps, not suspects."""

from __future__ import annotations

from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core.apply import apply
from services.scheduler.core.plan import BatchOutcome, StepOutcome, StepPlan
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import planned, step, submit


def ran_out(batch: StepPlan) -> StepOutcome:
    return StepOutcome(batch.epoch, batch.number, BatchOutcome.FAILED, error=TokenloomError(ErrorCode.OUT_OF_MEMORY, "no memory"))


def test_the_budget_is_halved_and_nobody_is_suspect():
    state = make_state(max_tokens_per_step=300)
    group = add_group(state, blocks=100)
    for number in range(1, 4):
        submit(state, [number] * 100)
    apply(state, group, ran_out(planned(state, group)), 1)
    assert group.most_tokens == 150
    assert not state.quarantine.suspects
    assert planned(state, group).tokens == 150


def test_it_falls_to_a_floor_below_which_the_batch_itself_is_suspect():
    state = make_state(max_tokens_per_step=100)
    group = add_group(state, blocks=100)
    request = submit(state, [1] * 120)
    apply(state, group, ran_out(planned(state, group)), 1)
    assert group.most_tokens == 64
    apply(state, group, ran_out(planned(state, group)), 1)
    assert group.most_tokens == 64
    assert list(state.quarantine.suspects) == [request]


def test_another_failure_leaves_the_budget_alone():
    state = make_state(max_tokens_per_step=300)
    group = add_group(state, blocks=100)
    submit(state, [1] * 100)
    batch = planned(state, group)
    error = TokenloomError(ErrorCode.STEP_FAILED, "a bug")
    apply(state, group, StepOutcome(batch.epoch, batch.number, BatchOutcome.FAILED, error=error), 1)
    assert group.most_tokens is None
    assert state.quarantine.suspects


def test_without_chunked_prefill_a_prompt_cannot_be_made_smaller():
    state = make_state(max_tokens_per_step=128, chunked_prefill=False)
    group = add_group(state, blocks=100)
    request = submit(state, [1] * 120)
    apply(state, group, ran_out(planned(state, group)), 1)
    assert group.most_tokens is None
    assert list(state.quarantine.suspects) == [request]


def test_requests_end_as_they_would_have():
    state = make_state(max_tokens_per_step=300)
    group = add_group(state, blocks=100)
    requests = [submit(state, [number] * 100, max_tokens=2) for number in range(1, 4)]
    apply(state, group, ran_out(planned(state, group)), 1)
    while state.requests:
        step(state, group)
    assert [len(request.output_ids) for request in requests] == [2, 2, 2]
    state.check()
