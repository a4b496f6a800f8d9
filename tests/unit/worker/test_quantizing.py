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

from libs.models.gguf_index import StoredTensor
from services.worker.ops.integer_packing import pack_integers
from services.worker.ops.quantized import GROUP
from services.worker.ops.weight_memory import WeightMemory
from services.worker.quantizing import from_blocks, grouped, has_groups, per_channel

FOUR_BITS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K]


def weights_between(least: float, most: float) -> st.SearchStrategy[np.ndarray]:
    """Weights of zeros and of magnitudes between these."""
    magnitudes = st.floats(least, most, width=32)
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 3).map(lambda groups: groups * GROUP))
    return arrays.arrays(np.float32, shapes, elements=st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda value: -value)))


def blocks(kind: GGMLQuantizationType, rows: int, inputs: int, seed: int) -> StoredTensor:
    """Random blocks of a type; halves are taken from their finite bit patterns."""
    random = np.random.default_rng(seed)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * inputs // per_block, block_bytes), np.uint8)
    halves = 1 if kind is GGMLQuantizationType.Q4_0 else 2
    data[:, : 2 * halves] = random.standard_normal((data.shape[0], halves)).astype("<f2").view(np.uint8)
    return StoredTensor("blk.0.ffn_up.weight", kind, data.reshape(rows, -1))


@settings(max_examples=60, deadline=None)
@given(weights_between(2.0**-100, 2.0**60))  # from normal scales to finite squares
def test_eight_bits_are_within_half_a_step_of_the_floats(values: np.ndarray):
    weight = per_channel(torch.from_numpy(values))
    scales = weight.scales.double()
    assert (weight.bits, weight.minimums, tuple(weight.scales.shape)) == (8, None, (values.shape[0], 1))
    assert torch.equal(weight.scales[:, 0], torch.from_numpy(np.abs(values).max(axis=1) / np.float32(127)))
    off = (weight.codes.double() * scales - torch.from_numpy(values).double()).abs()
    assert (off <= scales * 0.50001).all()


@settings(max_examples=60, deadline=None)
@given(weights_between(2.0**-8, 2.0**15))  # scales and minimums that are normal numbers of 16 bits
def test_four_bits_are_no_further_from_the_floats_than_codes_from_the_least_to_the_greatest_value(values: np.ndarray):
    weight = grouped(torch.from_numpy(values))
    assert (weight.bits, tuple(weight.scales.shape)) == (4, (values.shape[0], values.shape[1] // GROUP))
    assert 0 <= int(weight.codes.min()) <= int(weight.codes.max()) <= 15
    wide = values.reshape(-1, GROUP).astype(np.float64)
    low, high = wide.min(axis=1, keepdims=True), wide.max(axis=1, keepdims=True)
    step = np.where(high > low, (high - low) / 15, 1.0)
    plain = ((np.rint((wide - low) / step) * step + low - wide) ** 2).sum(axis=1)
    ours = ((weight.dequantized().numpy().reshape(-1, GROUP) - wide) ** 2).sum(axis=1)
    # What 16 bits cannot tell apart: values beside a minimum a thousand times as large.
    floor = GROUP * (np.abs(wide).max(axis=1) * 2**-10) ** 2
    assert torch.equal(weight.scales.half().float(), weight.scales)
    assert torch.equal(weight.minimums.half().float(), weight.minimums)
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


@pytest.mark.parametrize("exponent", range(-40, 41, 4))
def test_a_weight_times_a_power_of_two_is_as_near_in_four_bits_or_refused_with_the_way_out(exponent: int):
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)) * 0.05
    if not -16 < exponent < 20:
        with pytest.raises(ValueError, match=r"--quantization int8 takes it$"):
            grouped(weight * 2.0**exponent)
        return
    off = float((grouped(weight).dequantized() - weight).norm())
    scaled = grouped(weight * 2.0**exponent).dequantized() / 2.0**exponent
    assert float((scaled - weight).norm()) < 1.02 * off


def test_groups_that_are_next_to_nothing_beside_the_others_may_become_zero():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4)) * 0.05
    weight[:4, :32] *= 2.0**-22
    weight[4, :32] *= 2.0**-60
    assert float((grouped(weight).dequantized() - weight)[:5, :32].abs().max()) < 2.0**-20


def test_one_great_weight_does_not_excuse_the_loss_of_all_others():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)) * 2.0**-21
    weight[0, 0] = 2.0**-6
    with pytest.raises(ValueError, match="so small"):
        grouped(weight)


@pytest.mark.parametrize("kind", FOUR_BITS, ids=lambda kind: kind.name)
def test_the_least_halves_of_a_gguf_stay_what_they_were_in_16_bits(kind: GGMLQuantizationType):
    """Products of a Q4_K's least factors too: they are whole numbers of the least number that there is."""
    stored = blocks(kind, 32, 256, 0)
    halves = 1 if kind is GGMLQuantizationType.Q4_0 else 2
    rows = stored.data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    rows[:, : 2 * halves] = np.random.default_rng(1).integers(1, 16, (rows.shape[0], halves)).astype("<u2").view(np.uint8)
    weight = from_blocks(stored)
    assert weight.minimums is not None
    assert 0 < float(weight.scales.abs().max()) < 2.0**-14
    for numbers in (weight.scales, weight.minimums):
        assert torch.equal(numbers.half().float(), numbers)
    packed = pack_integers(weight, None, WeightMemory())
    assert packed.panels.shape[0] == 1


def test_inputs_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"80 inputs are no multiple of 32.*int8 takes it"):
        grouped(torch.ones(4, 80))
