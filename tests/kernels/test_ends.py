"""Kernels read nothing beyond what they are given: it ends at a page that must not be touched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.worker.ops.base import HeadShape, LayerCache, StepInputs, Value
from services.worker.ops.cpu import CpuOps
from tests.kernels.support import POSITIONS, REFERENCE, GuardedMemory, apply, at_the_end, empty_cache, randn, sequences
from tests.support.quantized import grouped, per_channel


@pytest.mark.parametrize("shape", [(32, 16), (100, 33), (272, 600)], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 65])
def test_products_of_floats_read_no_further_than_their_inputs(
    ops: CpuOps, shape: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ops, "_memory", GuardedMemory())
    x, weight, bias = at_the_end(randn(rows, shape[1])), randn(*shape, seed=1), randn(shape[0], seed=2)
    packed = ops.pack_linear(weight, bias)
    actual = apply(ops, lambda ops, value: ops.linear(value, packed), x)
    torch.testing.assert_close(actual, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [per_channel, grouped], ids=["8", "4"])
@pytest.mark.parametrize("rows", [1, 9, 65])
def test_products_of_integers_read_no_further_than_their_inputs(integer_ops: CpuOps, make, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(integer_ops, "_memory", GuardedMemory())
    x, weight = at_the_end(randn(rows, 96)), make(randn(70, 96, seed=1))
    packed = integer_ops.pack_linear(weight, None)
    actual = apply(integer_ops, lambda ops, value: ops.linear(value, packed), x)
    torch.testing.assert_close(actual, x @ weight.dequantized().t(), atol=0.5, rtol=0.05)


@pytest.mark.parametrize("heads", [HeadShape(9, 3, 64), HeadShape(5, 1, 80)], ids=str)
def test_attention_reads_no_further_than_queries_and_cache(ops: CpuOps, heads: HeadShape):
    known = sequences([300, 35], 7, seed=3)
    known.tables[0][-1] = known.num_blocks - 1  # what the last row sees ends with the cache
    known.tables[1][:] = [0, 1, 2]
    known.tables[0][:-1] = range(3, 3 + len(known.tables[0]) - 1)
    table = at_the_end(randn(7, (heads.query_heads + 2 * heads.kv_heads) * heads.head_dim))
    rotations = at_the_end(randn(POSITIONS, heads.head_dim, seed=2))
    results = []
    for which in (ops, REFERENCE):
        empty = empty_cache(known.num_blocks, heads)
        keys = at_the_end(empty.keys.transpose(2, 3)).transpose(2, 3)
        cache = LayerCache(keys, at_the_end(empty.values))

        def forward(inputs: StepInputs, layers: Sequence[LayerCache], which=which) -> Value:
            rotated = which.rope_and_cache(which.embedding(inputs.token_ids, table), rotations, layers[0], inputs, heads)
            return which.attention(rotated, layers[0], inputs, heads, 0.1)

        step = which.bind(forward, [cache], 400)
        results.append(step(known.step([(0, 0, 300), (1, 0, 35)])).clone())
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
