"""Products with weights of 4 bits against exact sums; whole models of integers against the reference, and themselves in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.base import HeadShape, Ops, PackedLinear
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from services.worker.ops.quantized import QuantizedWeight, Weight
from tests.kernels.support import REFERENCE, Running, Shapes, apply, randn, sequences
from tests.kernels.test_int8 import product, whole_numbers
from tests.support.quantized import grouped, per_channel

# A model whose products all have inputs in groups of 32.
SHAPE = Shapes(HeadShape(4, 2, 16), hidden=64, inner=96, vocabulary=70, layers=2, bias=True)
MAKERS = {
    "int8": per_channel,
    "q4_0": grouped,
    "q4_1": lambda weight: grouped(weight, minimums=True),
}


class Quantizing:
    """Ops that make integers of every product's weight."""

    def __init__(self, ops: Ops, make: Callable[[torch.Tensor], QuantizedWeight]) -> None:
        self._ops, self._make = ops, make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None, *, gated: bool = False) -> PackedLinear:
        assert isinstance(weight, torch.Tensor)
        return self._ops.pack_linear(self._make(weight), bias, gated=gated)


@pytest.mark.parametrize("with_minimums", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (32, 32), (100, 96), (272, 576)], ids=str)
def test_sums_are_those_of_exact_integer_arithmetic(integer_ops: CpuOps, shape: tuple[int, int], with_minimums: bool):
    random = np.random.default_rng(1)
    codes, minimums = random.integers(0, 16, shape), random.integers(-8, 9, (shape[0], shape[1] // 32))
    weight = QuantizedWeight(
        bits=4,
        codes=torch.from_numpy(codes.astype(np.int8)),
        scales=torch.ones(minimums.shape),
        minimums=torch.from_numpy(minimums).float() if with_minimums else None,
    )
    whole = codes + np.repeat(minimums, 32, axis=1) if with_minimums else codes
    for rows in (1, 2, 3, 6, 7, 40):
        x = whole_numbers(rows, shape[1])
        exact = torch.from_numpy(x.numpy().astype(np.int64) @ whole.T).float()
        assert torch.equal(product(integer_ops, weight, x), exact)


@pytest.mark.parametrize("activation", [-127, 127])
def test_the_greatest_products_do_not_saturate(integer_ops: CpuOps, activation: int):
    weight = QuantizedWeight(4, torch.full((33, 128), 15, dtype=torch.int8), torch.ones(33, 4), None)
    assert (product(integer_ops, weight, torch.full((2, 128), float(activation))) == 128 * 15 * activation).all()


@pytest.mark.parametrize("with_minimums", [False, True])
def test_scales_minimums_and_bias_are_applied(integer_ops: CpuOps, with_minimums: bool):
    weight, bias, x = grouped(randn(50, 96, seed=1), minimums=with_minimums), randn(50, seed=2), whole_numbers(9, 96)
    expected = torch.nn.functional.linear(x.double(), weight.dequantized().double(), bias.double())
    torch.testing.assert_close(product(integer_ops, weight, x, bias).double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("scale", [6e-8, 1e-5, 1.0, 60_000.0])
def test_scales_of_16_bits_are_read_as_they_are(integer_ops: CpuOps, scale: float):
    """Those without an implicit one among them: 6e-8 is the least that there is."""
    scales = torch.full((32, 1), scale).half().float()
    weight = QuantizedWeight(4, torch.ones(32, 32, dtype=torch.int8), scales, -scales / 2 if scale == 1.0 else None)
    x = torch.full((1, 32), 127.0)
    assert torch.equal(product(integer_ops, weight, x), (weight.dequantized().sum(1) * 127)[None])


@pytest.mark.parametrize(("scale", "minimum"), [(1e-9, 0.0), (1.0, 3e-8), (1e-5, 0.0), (7e4, 0.0), (1.0, -7e4)])
def test_what_16_bits_do_not_hold_is_refused_with_the_way_out(best: CpuLibrary, scale: float, minimum: float):
    weight = QuantizedWeight(4, torch.ones(32, 32, dtype=torch.int8), torch.full((32, 1), scale), torch.full((32, 1), minimum))
    with pytest.raises(TokenloomError, match=r"--quantization int8 takes them$") as caught:
        CpuOps(best, Team(best, 1)).pack_linear(weight, None)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_row_has_the_same_bits_for_every_number_of_rows_and_threads(integer_ops: CpuOps):
    x, packed = randn(40, 192, seed=4), integer_ops.pack_linear(grouped(randn(80, 192, seed=5), minimums=True), randn(80, seed=6))
    whole = apply(integer_ops, lambda ops, value: ops.linear(value, packed), x)
    for rows in range(1, 41):
        assert torch.equal(apply(integer_ops, lambda ops, value: ops.linear(value, packed), x[:rows].contiguous()), whole[:rows])
    alone = CpuOps(integer_ops._library, Team(integer_ops._library, 1))
    assert torch.equal(apply(alone, lambda ops, value: ops.linear(value, packed), x[29:30].contiguous())[0], whole[29])


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_of_integers_is_near_the_reference_with_the_floats_that_they_stand_for(integer_ops: CpuOps, kind: str):
    known = sequences([70, 5, 33], SHAPE.vocabulary, 1)
    ours, theirs = (Running(Quantizing(ops, MAKERS[kind]), SHAPE, known.num_blocks) for ops in (integer_ops, REFERENCE))
    inputs = known.step([(0, 0, 70), (1, 0, 5), (2, 0, 33)], sampled=range(108))
    actual, expected = ours(inputs), theirs(inputs)
    assert ((actual - expected).norm(dim=1) < 0.03 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_row_of_a_model_of_integers_has_the_same_bits_in_any_company_and_chunking(best: CpuLibrary, kind: str, threads: int):
    wanted = [40, 7, 90, 1, 23]
    known = sequences(wanted, SHAPE.vocabulary, 2)
    alone = Running(Quantizing(CpuOps(best, Team(best, threads)), MAKERS[kind]), SHAPE, known.num_blocks)
    expected = [alone(known.step([(which, 0, length)])) for which, length in enumerate(wanted)]
    mixed = Running(Quantizing(CpuOps(best, Team(best, 2)), MAKERS[kind]), SHAPE, known.num_blocks)
    mixed(known.step([(which, 0, length // 2) for which, length in enumerate(wanted) if length > 1]))
    whole = mixed(known.step([(which, length // 2, length - length // 2) for which, length in enumerate(wanted)]))
    for row, logits in enumerate(expected):
        assert torch.equal(whole[row], logits[0])
