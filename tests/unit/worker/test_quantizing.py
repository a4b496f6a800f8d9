"""Weights as integers: how far from the floats they are, and that a GGUF's blocks stay what they were."""

from __future__ import annotations

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from services.worker.gguf_index import StoredTensor
from services.worker.ops.quantized import GROUP
from services.worker.quantizing import from_blocks, grouped, has_groups, per_channel

FOUR_BITS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K]
# From the least magnitude whose scale is still a normal number to the greatest whose squares are finite.
MAGNITUDES = st.floats(2.0**-100, 2.0**60, width=32)
WEIGHTS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 3).map(lambda groups: groups * GROUP)),
    elements=st.one_of(st.just(0.0), MAGNITUDES, MAGNITUDES.map(lambda value: -value)),
)


def blocks(kind: GGMLQuantizationType, rows: int, inputs: int, seed: int) -> StoredTensor:
    """Random blocks of a type; halves are taken from their finite bit patterns."""
    random = np.random.default_rng(seed)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * inputs // per_block, block_bytes), np.uint8)
    halves = 1 if kind is GGMLQuantizationType.Q4_0 else 2
    data[:, : 2 * halves] = random.standard_normal((data.shape[0], halves)).astype("<f2").view(np.uint8)
    return StoredTensor("blk.0.ffn_up.weight", kind, data.reshape(rows, -1))


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_eight_bits_are_within_half_a_step_of_the_floats(values: np.ndarray):
    weight = per_channel(torch.from_numpy(values))
    scales = weight.scales.double()
    assert (weight.bits, weight.minimums, tuple(weight.scales.shape)) == (8, None, (values.shape[0], 1))
    assert torch.equal(weight.scales[:, 0], torch.from_numpy(np.abs(values).max(axis=1) / np.float32(127)))
    off = (weight.codes.double() * scales - torch.from_numpy(values).double()).abs()
    assert (off <= scales * 0.50001).all()


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_four_bits_are_no_further_from_the_floats_than_codes_from_the_least_to_the_greatest_value(values: np.ndarray):
    weight = grouped(torch.from_numpy(values))
    assert (weight.bits, tuple(weight.scales.shape)) == (4, (values.shape[0], values.shape[1] // GROUP))
    assert 0 <= int(weight.codes.min()) <= int(weight.codes.max()) <= 15
    wide = values.reshape(-1, GROUP).astype(np.float64)
    low, high = wide.min(axis=1, keepdims=True), wide.max(axis=1, keepdims=True)
    step = np.where(high > low, (high - low) / 15, 1.0)
    plain = ((np.rint((wide - low) / step) * step + low - wide) ** 2).sum(axis=1)
    ours = ((weight.dequantized().numpy().reshape(-1, GROUP) - wide) ** 2).sum(axis=1)
    # What float32 itself cannot tell apart: values beside a minimum a million times as large.
    floor = GROUP * (np.abs(wide).max(axis=1) * 1e-6) ** 2
    assert (ours <= plain * 1.0001 + floor).all()


def test_a_search_for_the_scale_pays_on_weights_as_models_have_them():
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    wide = values.reshape(-1, GROUP)
    low = wide.min(axis=1, keepdims=True)
    step = (wide.max(axis=1, keepdims=True) - low) / 15
    plain = ((np.rint((wide - low) / step) * step + low - wide) ** 2).sum()
    assert float((grouped(torch.from_numpy(values)).dequantized() - torch.from_numpy(values)).square().sum()) < 0.9 * plain


@pytest.mark.parametrize("kind", FOUR_BITS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_ggufs_blocks_of_four_bits_stay_what_they_were(kind: GGMLQuantizationType, seed: int):
    stored = blocks(kind, 5, 512, seed)
    weight = from_blocks(stored)
    assert has_groups(stored)
    assert (weight.bits, weight.shape, tuple(weight.scales.shape)) == (4, (5, 512), (5, 512 // GROUP))
    assert 0 <= int(weight.codes.min()) <= int(weight.codes.max()) <= 15
    theirs = gguf.quants.dequantize(stored.data, kind)
    np.testing.assert_array_equal(weight.dequantized().numpy(), theirs)


def test_other_blocks_are_not_groups_of_four_bits():
    values = np.ones((2, 256), np.float32)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1):
        assert not has_groups(StoredTensor("w", kind, gguf.quants.quantize(values, kind)))


def test_floats_that_were_four_bits_are_found_again():
    """Of a GGUF that somebody made floats of again: those that were on a grid are to stay on it."""
    stored = blocks(GGMLQuantizationType.Q4_1, 64, 512, 0)
    floats = from_blocks(stored).dequantized()
    again = grouped(floats).dequantized()
    assert float((again - floats).square().mean().sqrt()) < 0.02 * float(floats.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [per_channel, grouped])
def test_sixteen_bit_checkpoints_give_what_their_floats_give(make, dtype: torch.dtype):
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = make(weight), make(weight.float())
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("make", [per_channel, grouped])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_rounded_alike_wherever_it_lies(make, threads: int):
    """Rows are worked on in pieces, by threads: a large weight's last row is what it is alone."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(1))
        whole, alone = make(weight), make(weight[-1:])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole.codes[-1:], alone.codes)
    assert torch.equal(whole.scales[-1:], alone.scales)


@pytest.mark.parametrize("make", [per_channel, grouped])
def test_rows_of_one_value_are_exact(make):
    weight = torch.tensor([[0.0], [0.75], [-3.5]]).expand(3, 64).contiguous()
    assert torch.allclose(make(weight).dequantized(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [per_channel, grouped])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(make, value: float):
    weight = torch.ones(4, 64)
    weight[2, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        make(weight)


def test_blocks_that_are_not_finite_are_refused():
    stored = blocks(GGMLQuantizationType.Q4_1, 2, 64, 0)
    stored.data[1, 1] = 0x7C
    stored.data[1, 0] = 0
    with pytest.raises(ValueError, match="not finite"):
        from_blocks(stored)


def test_inputs_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="80 inputs are no multiple of 32"):
        grouped(torch.ones(4, 80))
