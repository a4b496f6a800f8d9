"""C++ products, norm, rotation and activation against the reference, and against themselves in other batches."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.base import HeadShape, LayerCache, StepInputs
from services.worker.ops.cpu import CpuOps
from services.worker.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32, 16), (96, 576), (100, 33), (1, 5), (272, 64)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 31, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_match_the_reference(ops: CpuOps, shape: tuple[int, int], rows: int, with_bias: bool):
    weight, bias = randn(*shape, seed=1), randn(shape[0], seed=2) if with_bias else None
    x = randn(rows, shape[1], seed=3)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, bias)).double(), expected, atol=2e-5, rtol=1e-4)


def test_a_row_of_a_product_is_bit_identical_whatever_the_number_of_rows(ops: CpuOps):
    x, packed = randn(200, 576, seed=4), ops.pack_linear(randn(320, 576, seed=5), None)
    whole = ops.linear(x, packed)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33, 100, 199):
        assert torch.equal(ops.linear(x[:rows].contiguous(), packed), whole[:rows])
    assert torch.equal(ops.linear(x[57:58].contiguous(), packed)[0], whole[57])


def test_logits_are_those_of_the_tokens_asked_for(ops: CpuOps):
    x, weight = randn(9, 64), randn(50, 64, seed=1)
    sampled = torch.tensor([2, 8])
    expected = REFERENCE.head(x, sampled, REFERENCE.pack_linear(weight, None))
    torch.testing.assert_close(ops.head(x, sampled, ops.pack_linear(weight, None)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 576), (70, 100), (3, 7)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms_match_the_reference(ops: CpuOps, rows: int, width: int, with_residual: bool):
    x, residual, weight = randn(rows, width, seed=6), randn(rows, width, seed=7) if with_residual else None, randn(width, seed=8)
    normed, total = ops.add_norm(x, residual, weight, 1e-5)
    expected, sums = REFERENCE.add_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(total, sums)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 1536), (70, 100), (2, 7)])
def test_activations_match_the_reference(ops: CpuOps, rows: int, width: int):
    gate_up = randn(rows, 2 * width, seed=9) * 6
    gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0
    torch.testing.assert_close(ops.gated_activation(gate_up), REFERENCE.gated_activation(gate_up), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("heads", [HeadShape(9, 3, 64), HeadShape(2, 2, 16), HeadShape(8, 1, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 6, 50])
def test_rotation_and_cache_writes_match_the_reference(ops: CpuOps, heads: HeadShape, tokens: int):
    def empty() -> LayerCache:
        keys = torch.zeros(8, heads.kv_heads, heads.head_dim, 16).transpose(2, 3)
        return LayerCache(keys, torch.zeros(8, heads.kv_heads, 16, heads.head_dim))

    generator = torch.Generator().manual_seed(1)
    none = torch.zeros(0, dtype=torch.int32)
    inputs = StepInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.randint(0, 300, (tokens,), generator=generator),
        cache_slots=torch.randperm(8 * 16, generator=generator)[:tokens],
        query_starts=none,
        kv_lengths=none,
        block_tables=none,
        sampled=none,
        longest=0,
    )
    qkv, rotations = randn(tokens, (heads.query_heads + 2 * heads.kv_heads) * heads.head_dim, seed=2), randn(300, heads.head_dim, seed=3)
    ours, theirs = empty(), empty()
    queries = ops.rope_and_cache(qkv, rotations, ours, inputs, heads)
    torch.testing.assert_close(queries, REFERENCE.rope_and_cache(qkv, rotations, theirs, inputs, heads), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.values, theirs.values)
