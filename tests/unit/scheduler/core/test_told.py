"""Log-probabilities in the core: with their tokens, each prompt position once, and the cache unread until all of them are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs.errors import ErrorCode
from libs.logprobs import PackedLogprobs
from libs.sampling import SamplingParams
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.plan import Delta, Effects, RowPositions, StepOutcome, StepPlan, Told
from services.scheduler.core.request import Request
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_request, make_state
from tests.support.logprobs import told, told_all
from tests.unit.scheduler.core.outcomes import TOKEN, failed, ok, planned, shape, step

LONG = [*range(1, 37), 1]  # 37 tokens: two full blocks and five of a third


@pytest.fixture
def state() -> SchedulerState:
    return make_state(max_tokens_per_step=16)


@pytest.fixture
def group(state: SchedulerState) -> Group:
    return add_group(state)


def submit(state: SchedulerState, prompt: list[int], *, logprobs: int | None = None, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    request = make_request(state, prompt, params)
    state.accept(request)
    return request


def answered(batch: StepPlan, **changes: Any) -> StepOutcome:
    """The batch ran, and each row tells what it owes."""
    positions = {}
    for index, row in enumerate(batch.rows):
        asked, prompt = row.request.sampling.prompt_logprobs, row.request.prompt_ids
        if asked is not None and (row.start < len(prompt) - 1 or not row.start):
            first = row.start + 1 if row.start else 0
            positions[index] = RowPositions(first, told_all(first, prompt[first : row.start + row.count + 1], asked))
    logprobs = [
        told(row.start + row.count, TOKEN, row.request.sampling.logprobs)
        if row.sample and row.request.sampling.logprobs is not None
        else PackedLogprobs(0)
        for row in batch.rows
    ]
    return replace(ok(batch), **{"logprobs": logprobs, "positions": positions, **changes})


def run(state: SchedulerState, group: Group) -> Effects:
    return apply(state, group, answered(planned(state, group)), 1)


class TestTokens:
    def test_they_come_with_their_tokens(self, state: SchedulerState, group: Group):
        asking, other = submit(state, [1, 2], logprobs=2), submit(state, [3])
        assert run(state, group).deltas == [Delta(asking, 0, [TOKEN], told(2, TOKEN, 2)), Delta(other, 0, [TOKEN])]

    @pytest.mark.parametrize(
        ("logprobs", "what"), [([], "0 tokens"), ([told(1, TOKEN, 1)], "1 alternative"), ([told_all(1, [TOKEN] * 2, 2)], "2 positions")]
    )
    def test_a_token_without_them_is_the_workers_fault(self, state: SchedulerState, group: Group, logprobs, what):
        request = submit(state, [1], logprobs=2)
        effects = apply(state, group, replace(ok(planned(state, group)), logprobs=logprobs), 1)
        assert (effects.deltas, effects.ended) == ([], [request]), what
        assert request.ending is not None
        assert request.ending.error is not None
        assert request.ending.error.code is ErrorCode.PROTOCOL_VIOLATION
        assert "log-probabilities of 2 alternatives" in request.ending.error.message

    def test_who_asked_for_none_is_told_none(self, state: SchedulerState, group: Group):
        request = submit(state, [1])
        effects = apply(state, group, replace(ok(planned(state, group)), logprobs=[told(1, TOKEN, 1)]), 1)
        assert effects.deltas == [Delta(request, 0, [TOKEN])]


class TestPrompts:
    def test_each_chunk_tells_the_position_behind_its_last_token_too(self, state: SchedulerState, group: Group):
        request = submit(state, LONG, prompt_logprobs=1)
        spans = [[(piece.first, piece.first + len(piece.logprobs)) for piece in run(state, group).told] for _ in range(4)]
        assert spans == [[(0, 17)], [(17, 33)], [(33, 37)], []]
        assert not request.needs_positions

    def test_a_prompt_of_one_token_has_one_undefined_position(self, state: SchedulerState, group: Group):
        request = submit(state, [7], prompt_logprobs=0)
        effects = run(state, group)
        assert (len(effects.told[0].logprobs), effects.told[0].logprobs.ranks) == (1, [0])
        assert effects.deltas == [Delta(request, 0, [TOKEN])]

    @pytest.mark.parametrize("why", ["preempted", "lost", "failed"])
    def test_what_was_told_is_not_told_again(self, state: SchedulerState, group: Group, why: str):
        request = submit(state, LONG, prompt_logprobs=1)
        first = run(state, group).told
        if why == "preempted":
            state.requeue(request, "preempted", 1)
        elif why == "lost":
            lose_group(state, group, 1, crashed=False)
            group = add_group(state, name="other")
        else:
            apply(state, group, failed(planned(state, group)), 1)
        assert run(state, group).told == []
        again = [piece for _ in range(2) for piece in run(state, group).told]
        assert [piece.first for piece in [*first, *again]] == [0, 17, 33]
        whole = PackedLogprobs(1)
        for piece in [*first, *again]:
            whole.extend(piece.logprobs)
        assert whole.token_ids == told_all(0, LONG, 1).token_ids

    def test_a_row_in_flight_when_its_request_was_preempted_still_tells(self, state: SchedulerState, group: Group):
        request = submit(state, LONG, prompt_logprobs=0)
        batch = planned(state, group)
        state.requeue(request, "preempted", 1)
        assert apply(state, group, answered(batch), 1).told == [Told(request, 0, told_all(0, LONG[:17]))]

    @pytest.mark.parametrize("kept", [slice(0, 16), slice(1, 17), slice(0, 0)])
    def test_a_row_that_owes_positions_ends_its_request(self, state: SchedulerState, group: Group, kept: slice):
        request = submit(state, LONG, prompt_logprobs=0)
        positions = {0: RowPositions(kept.start, told_all(kept.start, LONG[kept]))} if kept.stop else {}
        effects = apply(state, group, answered(planned(state, group), positions=positions), 1)
        assert (effects.told, effects.ended) == ([], [request])
        assert request.ending is not None
        assert request.ending.error is not None
        assert "prompt positions 0 to 16 are missing" in request.ending.error.message


class TestCache:
    @pytest.mark.parametrize("asked", [None, 0])
    def test_a_prompt_whose_positions_are_wanted_is_computed_whole(self, state: SchedulerState, group: Group, asked: int | None):
        submit(state, LONG)
        for _ in range(6):
            run(state, group)
        assert not group.running
        submit(state, LONG, prompt_logprobs=asked)
        batch = planned(state, group)
        assert shape(batch) == [(2, 0, 16, False) if asked == 0 else (2, 32, 5, True)]
        assert (state.counters.prefix_queries, state.counters.prefix_hits) == ((37, 0) if asked == 0 else (74, 32))

    def test_it_waits_for_nobody_who_computes_the_same(self, state: SchedulerState, group: Group):
        state.limits = replace(state.limits, max_tokens_per_step=80)
        submit(state, LONG)
        submit(state, LONG, prompt_logprobs=0)
        assert shape(planned(state, group)) == [(1, 0, 37, True), (2, 0, 37, True)]

    def test_others_read_what_it_computed(self, state: SchedulerState, group: Group):
        submit(state, LONG, prompt_logprobs=0)
        for _ in range(6):
            run(state, group)
        submit(state, LONG)
        assert shape(planned(state, group)) == [(2, 32, 5, True)]

    def test_once_all_is_told_it_resumes_from_the_cache(self, state: SchedulerState, group: Group):
        request = submit(state, LONG, prompt_logprobs=0)
        for _ in range(3):
            run(state, group)
        state.requeue(request, "preempted", 1)
        assert shape(planned(state, group)) == [(1, 32, 6, True)]


def test_a_step_for_nobody_who_asks_tells_nothing(state: SchedulerState, group: Group):
    submit_plain = submit(state, [1, 2, 3])
    effects = step(state, group)[1]
    assert effects.told == []
    assert effects.deltas == [Delta(submit_plain, 0, [TOKEN])]
