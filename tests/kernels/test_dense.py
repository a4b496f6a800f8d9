"""Products, norm and activation as programs, against the reference, and against themselves in other batches."""

from __future__ import annotations

import pytest
import torch

from libs.errors import TokenloomError
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from tests.kernels.support import REFERENCE, apply, one_row_each, randn
from tests.support.quantized import per_channel


@pytest.mark.parametrize("shape", [(32, 16), (96, 576), (100, 33), (1, 5), (272, 64)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_right_for_any_number_of_rows(ops: CpuOps, shape: tuple[int, int], with_bias: bool):
    weight, bias = randn(*shape, seed=1), randn(shape[0], seed=2) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    for rows in (1, 2, 3, 7, 8, 9, 31, 70):
        x = randn(rows, shape[1], seed=3)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        actual = apply(ops, lambda ops, value: ops.linear(value, packed), x)
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_product_has_the_same_bits_for_every_number_of_rows_and_every_cut(ops: CpuOps, gated: bool):
    x, weight = randn(199, 600, seed=4), randn(328, 600, seed=5)
    whole = _product(ops, weight, x, gated)
    assert torch.equal(_product(ops, weight, x[57:58].contiguous(), gated)[0], whole[57])
    for threads in (1, 2, 7):
        cut = CpuOps(ops._library, Team(ops._library, threads))
        for rows in (*range(1, 41), 63, 64, 65, 100, 158):
            assert torch.equal(_product(cut, weight, x[:rows].contiguous(), gated), whole[:rows])


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_may_lie_in_any_order(ops: CpuOps, gated: bool):
    x, weight = randn(3, 50, seed=1), randn(64, 50, seed=2)
    assert torch.equal(_product(ops, weight.t().contiguous().t(), x, gated), _product(ops, weight, x, gated))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [torch.zeros(32), torch.zeros(63), torch.zeros(64, 1), torch.zeros(64, dtype=torch.float64)])
def test_a_bias_of_another_shape_or_type_is_refused(best: CpuLibrary, bias: torch.Tensor, gated: bool):
    """It would be read beyond its end."""
    ops = CpuOps(best, Team(best, 1))
    for weight in (torch.zeros(64, 32), per_channel(torch.zeros(64, 32))):
        with pytest.raises(TokenloomError, match="bias"):
            ops.pack_linear(weight, bias, gated=gated)


def test_sums_are_those_of_blocks_of_256_inputs(ops: CpuOps):
    """In one accumulator each of the ones would be lost beside 1e8, whose neighbours are 8 away."""
    x = torch.zeros(13, 700)
    x[:, 0], x[:, 256:512] = 1e8, 1.0
    assert (_product(ops, torch.ones(40, 700), x, gated=False) == 100_000_256.0).all()


def _product(ops: CpuOps, weight: torch.Tensor, x: torch.Tensor, gated: bool) -> torch.Tensor:
    packed = ops.pack_linear(weight, None, gated=gated)
    return apply(ops, lambda ops, value: ops.linear(value, packed), x)


@pytest.mark.parametrize("sampled", [[2, 8], [5, 5, 0], []], ids=str)
def test_logits_are_those_of_the_tokens_asked_for(ops: CpuOps, sampled: list[int]):
    x, weight = randn(9, 64), randn(50, 64, seed=1)
    packed = ops.pack_linear(weight, None)
    step = ops.bind(lambda inputs, cache: ops.head(ops.embedding(inputs.token_ids, x), inputs.sampled, packed), [], 9)
    inputs = one_row_each(9)
    object.__setattr__(inputs, "sampled", torch.tensor(sampled, dtype=torch.int64))
    expected = REFERENCE.head(x, inputs.sampled, REFERENCE.pack_linear(weight, None))
    torch.testing.assert_close(step(inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 576), (70, 100), (3, 7)])
def test_norms_match_the_reference(ops: CpuOps, rows: int, width: int):
    x, weight = randn(rows, width, seed=6), randn(width, seed=8)
    actual = apply(ops, lambda ops, value: ops.norm(value, weight, 1e-5), x)
    torch.testing.assert_close(actual, REFERENCE.norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows", "width", "inputs"), [(1, 16, 1), (5, 96, 600), (70, 100, 33), (3, 7, 5), (2, 17, 257)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_products_match_the_reference(ops: CpuOps, rows: int, width: int, inputs: int, with_bias: bool):
    x, weight, bias = randn(rows, inputs, seed=9), randn(2 * width, inputs, seed=1), randn(2 * width, seed=2) if with_bias else None
    expected = REFERENCE.linear(x.double(), REFERENCE.pack_linear(weight.double(), None if bias is None else bias.double(), gated=True))
    packed = ops.pack_linear(weight, bias, gated=True)
    actual = apply(ops, lambda ops, value: ops.linear(value, packed), x)
    torch.testing.assert_close(actual.double(), expected, atol=2e-4, rtol=1e-4)


def test_gates_at_both_ends_neither_overflow_nor_round(ops: CpuOps):
    packed = ops.pack_linear(torch.eye(40)[torch.arange(80) % 40], None, gated=True)
    gates = randn(3, 40, seed=9) * 6
    gates[0, 0], gates[0, 1] = 200.0, -200.0
    actual = apply(ops, lambda ops, value: ops.linear(value, packed), gates)
    torch.testing.assert_close(actual, torch.nn.functional.silu(gates) * gates, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (14, 48), (9, 100), (2, 7)])
def test_a_residual_is_added_last_in_float32(ops: CpuOps, rows: int, width: int):
    x, packed = randn(rows, width, seed=3), ops.pack_linear(randn(width, width, seed=1), None)
    alone = apply(ops, lambda ops, value: ops.linear(value, packed), x)
    assert torch.equal(apply(ops, lambda ops, value: ops.linear(value, packed, residual=value), x), x + alone)


def test_what_is_not_finite_stays_so_and_keeps_to_its_row(ops: CpuOps):
    x, packed = randn(6, 32, seed=1), ops.pack_linear(randn(40, 32, seed=2), None)
    x[2, 7], x[4, 3] = float("nan"), float("inf")
    norm = torch.ones(32)
    result = apply(ops, lambda ops, value: ops.linear(ops.norm(value, norm, 1e-5), packed), x)
    assert torch.isfinite(result).all(dim=1).tolist() == [True, True, False, True, False, True]
