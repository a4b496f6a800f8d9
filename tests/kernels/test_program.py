"""Whole models as programs: against the reference on random ragged batches, and bit by bit against themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.ops.base import HeadShape
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from tests.kernels.support import REFERENCE, Running, Shapes, sequences

# The fixtures are the same for all examples on purpose.
SHARED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

shapes = st.builds(
    Shapes,
    heads=st.sampled_from([HeadShape(4, 2, 16), HeadShape(3, 3, 32), HeadShape(9, 3, 16), HeadShape(7, 1, 48)]),
    hidden=st.sampled_from([1, 15, 33, 48, 100]),
    inner=st.sampled_from([1, 7, 32, 40, 90]),
    vocabulary=st.sampled_from([5, 32, 70]),
    layers=st.integers(1, 2),
    bias=st.booleans(),
    tied=st.booleans(),
    picks=st.booleans(),
)
# For comparing sums of two orders: a norm over one channel is nearly its sign, and makes much of the last bits of a number near zero.
smooth = shapes.filter(lambda shape: shape.hidden >= 15)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def schedule(wanted: list[int], seed: int) -> list[list[tuple[int, int, int]]]:
    """Steps that compute all tokens of sequences of `wanted` lengths, in chunks of random sizes, in random company and order."""
    random, done, steps = np.random.default_rng(seed), [0] * len(wanted), []
    while any(have < want for have, want in zip(done, wanted, strict=True)):
        step = []
        for which in random.permutation(len(wanted)).tolist():
            left = wanted[which] - done[which]
            if left and random.random() < 0.7:
                count = int(random.integers(1, min(left, int(random.choice([1, 5, 60]))) + 1))
                step.append((which, done[which], count))
                done[which] += count
        if step:
            steps.append(step)
    return steps


@SHARED
@given(shape=smooth, wanted=lengths, seed=st.integers(0, 2**16))
def test_random_models_on_random_ragged_batches_match_the_reference(ops: CpuOps, shape: Shapes, wanted: list[int], seed: int):
    known = sequences(wanted, shape.vocabulary, seed)
    ours, theirs = (Running(which, shape, known.num_blocks, seed) for which in (ops, REFERENCE))
    for step in schedule(wanted, seed):
        inputs = known.step(step)
        torch.testing.assert_close(ours(inputs), theirs(inputs), atol=2e-3, rtol=2e-3)


@SHARED
@given(shape=shapes, wanted=lengths, seed=st.integers(0, 2**16), threads=st.sampled_from([1, 3, 7]))
def test_every_row_has_the_same_bits_in_any_company_chunking_and_team(
    ops: CpuOps, shape: Shapes, wanted: list[int], seed: int, threads: int
):
    known = sequences(wanted, shape.vocabulary, seed)
    alone = Running(CpuOps(ops._library, Team(ops._library, threads)), shape, known.num_blocks)
    expected = [alone(known.step([(which, 0, length)], sampled=range(length))) for which, length in enumerate(wanted)]
    mixed = Running(ops, shape, known.num_blocks)
    for step in schedule(wanted, seed):
        logits = mixed(known.step(step))
        for row, (which, start, count) in enumerate(step):
            assert torch.equal(logits[row], expected[which][start + count - 1])


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_a_long_prompt_beside_decodes_has_the_same_bits_for_any_number_of_threads(best: CpuLibrary, threads: int):
    shape = Shapes(HeadShape(9, 3, 64), hidden=192, inner=416, vocabulary=500, layers=2)
    wanted = [300, *range(20, 60)]
    known = sequences(wanted, shape.vocabulary, 1)
    results = []
    for size in (threads, 2):
        running = Running(CpuOps(best, Team(best, size)), shape, known.num_blocks)
        running(known.step([(which, 0, length - 1) for which, length in enumerate(wanted) if which]))
        results += [running(known.step([(0, 0, 300), *((which, length - 1, 1) for which, length in enumerate(wanted) if which)]))]
    assert torch.equal(results[0], results[1])
    assert torch.isfinite(results[0]).all()


def test_the_same_step_again_gives_the_same_bits_over_hundreds_of_steps_of_random_size(best: CpuLibrary):
    shape = Shapes()
    random = np.random.default_rng(5)
    known = sequences([100] * 6, shape.vocabulary, 2)
    running, fresh = (Running(CpuOps(best, Team(best, size)), shape, known.num_blocks) for size in (3, 1))
    for _ in range(300):
        rows = [(int(which), 0, int(random.integers(1, 101))) for which in random.permutation(6)[: random.integers(1, 7)]]
        inputs = known.step(rows)
        assert torch.equal(running(inputs), fresh(inputs))
