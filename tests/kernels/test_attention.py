"""Rotation, cache writes and paged attention as programs, against the reference, for every instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.worker.ops.base import HeadShape, LayerCache, Ops, StepInputs, Value
from services.worker.ops.cpu import CpuOps, supports
from tests.kernels.support import POSITIONS, REFERENCE, Sequences, empty_cache, randn, sequences

HEADS = [HeadShape(9, 3, 64), HeadShape(4, 4, 16), HeadShape(32, 1, 128), HeadShape(8, 2, 256), HeadShape(5, 1, 80)]
VOCABULARY = 50
# An id whose query, key and value are not finite; `sequences` draws none of it.
NOT_FINITE = VOCABULARY


class Attending:
    """Attention alone: the embedding's rows are queries, keys and values."""

    def __init__(self, ops: Ops, heads: HeadShape, blocks: int, *, scale: float | None = None, factor: float = 1.0) -> None:
        self.cache = empty_cache(blocks, heads)
        table = randn(VOCABULARY + 1, (heads.query_heads + 2 * heads.kv_heads) * heads.head_dim, seed=1)
        table[:, : heads.query_heads * heads.head_dim] *= factor
        table[NOT_FINITE] = torch.tensor([float("nan"), float("inf")]).repeat(table.shape[1] // 2)
        rotations = randn(POSITIONS, heads.head_dim, seed=2)
        scale = heads.head_dim**-0.5 if scale is None else scale

        def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
            rotated = ops.rope_and_cache(ops.embedding(inputs.token_ids, table), rotations, cache[0], inputs, heads)
            return ops.attention(rotated, cache[0], inputs, heads, scale)

        self._step = ops.bind(forward, [self.cache], 2000)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        return self._step(inputs).clone()


def ragged(seed: int) -> tuple[Sequences, list[tuple[int, int, int]]]:
    random = np.random.default_rng(seed)
    rows = [(at, int(random.integers(0, 200)), int(random.choice([1, 1, 1, 2, 15, 16, 17, 70]))) for at in range(random.integers(1, 9))]
    return sequences([start + count for _, start, count in rows], VOCABULARY, seed), rows


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_match_the_reference_and_so_does_the_cache(ops: CpuOps, heads: HeadShape, seed: int):
    _compare(ops, heads, *ragged(seed))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rows_of_several_spans_match_the_reference(ops: CpuOps, heads: HeadShape):
    """A span is 256 positions: rows that end one behind it, in the second one and just before its end."""
    _compare(ops, heads, sequences([257, 300, 511], VOCABULARY, seed=8), [(0, 256, 1), (1, 230, 70), (2, 495, 16)])


def _compare(ops: CpuOps, heads: HeadShape, known: Sequences, rows: list[tuple[int, int, int]]) -> None:
    ours, theirs = (Attending(which, heads, known.num_blocks) for which in (ops, REFERENCE))
    before = [(at, 0, start) for at, start, _ in rows if start]
    for step in (before, rows):
        if step:
            inputs = known.step(step)
            torch.testing.assert_close(ours(inputs), theirs(inputs), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.cache.keys, theirs.cache.keys, atol=1e-6, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours.cache.values, theirs.cache.values, atol=0, rtol=0, equal_nan=True)


def test_a_sequence_of_one_token_returns_its_value(ops: CpuOps):
    heads = HeadShape(6, 2, 32)
    known = sequences([1], VOCABULARY)
    attending = Attending(ops, heads, known.num_blocks)
    result = attending(known.step([(0, 0, 1)])).view(6, 32)
    value = attending.cache.values[int(known.tables[0][0]), :, 0]
    assert torch.equal(result, value.repeat_interleave(3, dim=0))


def test_large_scores_do_not_overflow(ops: CpuOps):
    heads, known = HeadShape(2, 1, 16), sequences([43], VOCABULARY)
    ours, theirs = (Attending(which, heads, known.num_blocks, scale=1.0, factor=1e4) for which in (ops, REFERENCE))
    for step in ([(0, 0, 40)], [(0, 40, 3)]):
        inputs = known.step(step)
        torch.testing.assert_close(ours(inputs), theirs(inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 7, 16, 31])
def test_a_row_is_bit_identical_alone_in_company_and_in_chunks(ops: CpuOps, size: int):
    heads, known = HeadShape(9, 3, 64), sequences([90, 131, 73], VOCABULARY, seed=4)
    together = Attending(ops, heads, known.num_blocks)
    together(known.step([(1, 0, 130), (2, 0, 33)]))
    rows = [(0, 0, 90), (1, 130, 1), (2, 33, 40)]
    whole = together(known.step(rows)).split([90, 1, 40])
    for (which, start, count), expected in zip(rows, whole, strict=True):
        alone = Attending(ops, heads, known.num_blocks)
        if start:
            alone(known.step([(which, 0, start)]))
        for at in range(0, count, size):
            part = min(size, count - at)
            assert torch.equal(alone(known.step([(which, start + at, part)])), expected[at : at + part])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_what_is_not_finite_reaches_no_earlier_token_of_its_chunk_and_no_other_row(ops: CpuOps, heads: HeadShape, executor: str):
    """An earlier token's block may be another request's prefix, so what comes behind must leave no trace in it."""
    known, rows = sequences([40, 21, 36], VOCABULARY, seed=6), [(0, 0, 40), (1, 0, 21), (2, 0, 36)]
    expected = Attending(ops if executor == "cpu" else REFERENCE, heads, known.num_blocks)(known.step(rows))
    known.ids[1][18] = NOT_FINITE
    actual = Attending(ops if executor == "cpu" else REFERENCE, heads, known.num_blocks)(known.step(rows))
    poisoned = torch.isnan(actual).any(dim=1)
    assert poisoned.nonzero()[:, 0].tolist() == [40 + 18, 40 + 19, 40 + 20]
    torch.testing.assert_close(actual[~poisoned], expected[~poisoned], atol=0 if executor == "cpu" else 1e-6, rtol=0)


def test_a_block_that_held_what_is_not_finite_is_as_good_as_any(ops: CpuOps):
    heads, known = HeadShape(9, 3, 64), sequences([35], VOCABULARY, seed=7)
    attending = Attending(ops, heads, known.num_blocks)
    expected = attending(known.step([(0, 0, 35)]))
    for bad in (float("nan"), float("inf"), float("-inf"), 3e38):
        attending.cache.keys.fill_(bad)
        attending.cache.values.fill_(bad)
        assert torch.equal(attending(known.step([(0, 0, 35)])), expected)
        assert torch.equal(attending(known.step([(0, 34, 1)])), expected[34:])


def test_heads_that_the_kernels_do_not_take_are_known():
    assert supports(HeadShape(9, 3, 64))
    assert not supports(HeadShape(9, 3, 40))
    assert not supports(HeadShape(2, 1, 272))
    assert not supports(HeadShape(64, 1, 64))
    assert not supports(HeadShape(5, 2, 64))
