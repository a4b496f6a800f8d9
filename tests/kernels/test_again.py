"""Logits of further tokens of the step that ran last: the bits that the step itself would have given, and nothing beside them changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.ops.base import MOST_AGAIN, LayerCache, Ops, StepInputs, Value
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from tests.kernels.support import POSITIONS, REFERENCE, Running, Shapes, one_row_each, randn, sequences

SHARED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTHS = [40, 1, 100]
TOKENS = sum(LENGTHS)
STEP = [(which, 0, length) for which, length in enumerate(LENGTHS)]


@SHARED
@given(picked=st.lists(st.integers(0, TOKENS - 1), max_size=MOST_AGAIN), sampled=st.lists(st.integers(0, TOKENS - 1), max_size=3))
def test_they_are_those_of_a_step_that_asks_for_them(ops: CpuOps, picked: list[int], sampled: list[int]):
    for executor in (ops, REFERENCE):
        known = sequences(LENGTHS, 70)
        running = Running(executor, Shapes(), known.num_blocks)
        expected = running(known.step(STEP, sampled=range(TOKENS)))
        running(known.step(STEP, sampled=sampled))
        for _ in range(2):
            assert torch.equal(running.run.again(torch.tensor(picked, dtype=torch.int64)), expected[picked])


def test_a_larger_step_before_it_changes_nothing_and_neither_does_it_to_the_next(best: CpuLibrary):
    known = sequences([300, 20], 70)
    running, fresh = (Running(CpuOps(best, Team(best, size)), Shapes(), known.num_blocks) for size in (3, 1))
    whole = fresh(known.step([(1, 0, 20)], sampled=range(20)))
    for _ in range(3):
        running(known.step([(0, 0, 300)], sampled=range(300)))
        running(known.step([(1, 0, 19)]))
        assert torch.equal(running.run.again(torch.arange(19)), whole[:19])
        assert torch.equal(running(known.step([(1, 19, 1)])), whole[19:])


def test_tokens_that_were_not_in_the_step_and_too_many_of_them_are_refused(best: CpuLibrary):
    known = sequences([5], 70)
    running = Running(CpuOps(best, Team(best, 2)), Shapes(), known.num_blocks)
    with pytest.raises(ValueError, match="no step has run"):
        running.run.again(torch.zeros(1, dtype=torch.int64))
    running(known.step([(0, 0, 5)]))
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="one is not in the step"):
            running.run.again(torch.tensor([wrong]))
    with pytest.raises(ValueError, match=f"{MOST_AGAIN} are taken at once"):
        running.run.again(torch.zeros(MOST_AGAIN + 1, dtype=torch.int64))
    assert running.run.again(torch.zeros(MOST_AGAIN, dtype=torch.int64)).shape == (MOST_AGAIN, 70)
    with pytest.raises(ValueError, match="cannot be"):
        running(replace(known.step([(0, 0, 5)]), positions=torch.full((5,), POSITIONS)))
    with pytest.raises(ValueError, match="no step has run"):
        running.run.again(torch.zeros(1, dtype=torch.int64))


def test_the_reference_refuses_it_before_its_first_step():
    with pytest.raises(ValueError, match="no step has run"):
        Running(type(REFERENCE)(), Shapes(), 4).run.again(torch.zeros(1, dtype=torch.int64))


def test_a_program_that_goes_on_with_all_tokens_has_nothing_to_repeat(best: CpuLibrary):
    executor: Ops = CpuOps(best, Team(best, 1))
    table = randn(4, 8)
    head = executor.pack_linear(randn(3, 8), None)

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        x = executor.embedding(inputs.token_ids, table)
        logits = executor.head(x, inputs.sampled, head)
        executor.norm(x, randn(8), 1e-5)
        return logits

    step = executor.bind(forward, [], 4)
    step(one_row_each(2))
    with pytest.raises(ValueError, match="not those of picked tokens alone"):
        step.again(torch.zeros(1, dtype=torch.int64))
