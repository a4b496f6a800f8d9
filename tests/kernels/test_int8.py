"""Products with weights of 8 bits: the integers are exact in every instruction set, and rows do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from libs.errors import TokenloomError
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from services.worker.ops.quantized import QuantizedWeight
from tests.kernels.support import apply, randn
from tests.support.quantized import grouped, per_channel


def product(ops: CpuOps, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = ops.pack_linear(weight, bias)
    return apply(ops, lambda ops, value: ops.linear(value, packed), x.contiguous())


def whole_numbers(rows: int, inputs: int) -> torch.Tensor:
    """Activations whose codes are they themselves: each 32 of them hold 127 or -127."""
    random = np.random.default_rng(rows)
    x = random.integers(-127, 128, (rows, inputs))
    x[:, ::32] = random.choice([-127, 127], x[:, ::32].shape)
    return torch.from_numpy(x).float()


def of_ones(codes: np.ndarray) -> QuantizedWeight:
    return QuantizedWeight(8, torch.from_numpy(codes.astype(np.int8)), torch.ones(codes.shape[0], 1), None)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (7, 33), (32, 64), (100, 96), (272, 576)], ids=str)
def test_sums_are_those_of_exact_integer_arithmetic(integer_ops: CpuOps, shape: tuple[int, int]):
    codes = np.random.default_rng(1).integers(-127, 128, shape)
    for rows in (1, 2, 3, 6, 7, 40):
        x = whole_numbers(rows, shape[1])
        exact = torch.from_numpy(x.numpy().astype(np.int64) @ codes.T).float()
        assert torch.equal(product(integer_ops, of_ones(codes), x), exact)


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("activation", [-127, 127])
def test_the_greatest_products_do_not_saturate(integer_ops: CpuOps, weight: int, activation: int):
    codes, x = np.full((33, 128), weight), torch.full((2, 128), float(activation))
    assert (product(integer_ops, of_ones(codes), x) == 128 * weight * activation).all()


def test_scales_and_bias_are_applied(integer_ops: CpuOps):
    weight, bias, x = per_channel(randn(50, 96, seed=1)), randn(50, seed=2), whole_numbers(9, 96)
    expected = torch.nn.functional.linear(x.double(), weight.dequantized().double(), bias.double())
    torch.testing.assert_close(product(integer_ops, weight, x, bias).double(), expected, atol=1e-3, rtol=1e-5)


def test_a_row_has_the_same_bits_for_every_number_of_rows_and_threads(integer_ops: CpuOps):
    x, weight = randn(40, 192, seed=4), per_channel(randn(80, 192, seed=5))
    packed = integer_ops.pack_linear(weight, randn(80, seed=6))
    whole = apply(integer_ops, lambda ops, value: ops.linear(value, packed), x)
    for rows in range(1, 41):
        assert torch.equal(apply(integer_ops, lambda ops, value: ops.linear(value, packed), x[:rows].contiguous()), whole[:rows])
    alone = CpuOps(integer_ops._library, Team(integer_ops._library, 1))
    assert torch.equal(apply(alone, lambda ops, value: ops.linear(value, packed), x[29:30].contiguous())[0], whole[29])


def test_all_instruction_sets_make_the_same_codes(integer_ops: CpuOps):
    """Halves among them: 254 of scale 2 is code 127, 3 is 1.5 and becomes 2, 1 becomes 0."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([254.0, 3.0, 1.0, -3.0, -1.0, 5.0])
    expected = torch.tensor([[127.0, 2.0, 0.0, -2.0, 0.0, 2.0]]) * 2
    assert torch.equal(product(integer_ops, of_ones(np.eye(6, 32)), x), expected)


def test_a_great_activation_costs_the_precision_of_its_group_alone(integer_ops: CpuOps):
    x, weight = randn(3, 96, seed=1), randn(40, 96, seed=2)
    x[:, 40] = 500.0
    others = torch.ones(96, dtype=torch.bool)
    others[32:64] = False
    weight[:, ~others] = 0
    expected = torch.nn.functional.linear(x[:, others].double(), per_channel(weight).dequantized()[:, others].double())
    torch.testing.assert_close(product(integer_ops, per_channel(weight), x).double(), expected, atol=0.3, rtol=0)


@pytest.mark.parametrize("tiny", [0.0, 1e-38, 1e-31])
def test_activations_of_nothing_count_as_zero(integer_ops: CpuOps, tiny: float):
    assert not product(integer_ops, per_channel(randn(40, 64)), torch.full((2, 64), tiny)).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_keeps_to_its_row(integer_ops: CpuOps, value: float):
    x = randn(6, 64)
    x[2, 7], x[4, 63] = value, value
    result = product(integer_ops, per_channel(randn(40, 64, seed=2)), x)
    assert torch.isfinite(result).all(dim=1).tolist() == [True, True, False, True, False, True]
    assert result[2].isnan().all()


def test_what_the_kernels_have_no_layout_of_is_refused(best: CpuLibrary):
    ops, weight = CpuOps(best, Team(best, 1)), grouped(randn(8, 64))
    for refused in (
        QuantizedWeight(8, weight.codes, weight.scales, None),
        QuantizedWeight(8, weight.codes, weight.scales[:, :1], weight.scales[:, :1]),
        QuantizedWeight(4, weight.codes, weight.scales[:, :1].repeat(1, 4), None),
        QuantizedWeight(4, weight.codes, weight.scales * 1e8, None),
        QuantizedWeight(5, weight.codes, weight.scales, None),
    ):
        with pytest.raises(TokenloomError, match="weights of integers"):
            ops.pack_linear(refused, None)
