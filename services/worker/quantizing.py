"""Weights as integers: from floats of any checkpoint, and from the blocks of a GGUF as they are.

Every float computed here is elementwise or a sum in one written-out order, so that two workers of any two machines load the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from libs.models.gguf_index import StoredTensor
from services.worker.ops.quantized import GROUP, QuantizedWeight

# Stands in the numerics identity. To be raised with every change by which the same checkpoint gives other integers, scales or minimums.
REVISION = 3

# Ends the refusal of what 4 bits alone cannot do.
WAY_OUT = "--quantization int8 takes it"
_INT8_MOST = 127
_INT4_MOST = 15
# Shares of a group's range that the codes may span: a narrower one clips the outermost values and is finer for the others. Squared error on
# normally distributed weights, codes from the least value to the greatest being 1: the whole range fitted 0.92, two spans 0.90, five 0.87.
_SPANS = (1.0, 0.95, 0.9, 0.85, 0.8)
# How far 16 bits may move a group's weights, beside its own: a quarter of a code's step, which the codes' own rounding outdoes, or a
# 2^-10 of its greatest weight, which is what normal numbers of 16 bits cost at most.
_OF_A_STEP, _OF_A_GROUP = np.float32(2**-2), np.float32(2**-10)
# And beside what the weight's groups have for their greatest, on average: a 2^9th of what 4 bits themselves cost there. So groups that were
# pruned to nearly nothing may become zero, and a weight that is small as a whole (the norm before it makes up for that) is refused.
_OF_ALL_GROUPS = np.float32(2**-14)
_MOST_OF_16_BITS = 65_504
# Weights that a thread works on at a time: its temporaries stay in its core's cache.
_AT_ONCE = 1 << 17

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def per_channel(weight: torch.Tensor) -> QuantizedWeight:
    """A float weight [outputs, inputs] in 8 bits, one scale an output: its greatest magnitude / 127. Rounded to nearest, ties to even.

    Raises ValueError for a weight that is not finite.
    """
    outputs, inputs = weight.shape
    codes, scales = np.empty((outputs, inputs), np.int8), np.empty((outputs, 1), np.float32)

    def quantize(rows: slice) -> None:
        values = weight[rows].float().numpy()
        scale = np.maximum(values.max(axis=1, keepdims=True), -values.min(axis=1, keepdims=True)) / np.float32(_INT8_MOST)
        scales[rows] = scale
        rounded = np.rint(values / _divisor(scale))
        # A scale so small that it lost bits of its own would reach beyond.
        codes[rows] = np.clip(rounded, -_INT8_MOST, _INT8_MOST, out=rounded)

    _by_rows(quantize, outputs, inputs)
    return QuantizedWeight(8, torch.from_numpy(codes), _finite(scales), None)


def grouped(weight: torch.Tensor) -> QuantizedWeight:
    """A float weight [outputs, inputs] in 4 bits, a scale and a minimum for each GROUP inputs, chosen for a small squared error.

    For a few spans of codes within a group's range: codes by rounding, then the scale and minimum that fit them best (least squares),
    rounded to 16 bits, the kernels' form. Those of the best span are kept, and codes are rounded once more, to them.

    Raises ValueError for a weight that is not finite, whose inputs are no multiple of GROUP, or whose scales 16 bits cannot hold.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs are no multiple of {GROUP}, the inputs that share a scale in 4 bits; {WAY_OUT}")
    codes = np.empty((outputs, inputs), np.int8)
    scales, minimums, greatest, lost = np.empty((4, outputs, inputs // GROUP), np.float32)

    def quantize(rows: slice) -> None:
        # A group's values in a column: sums over groups are then sums of rows, whose order can be written out at no cost.
        values = np.ascontiguousarray(weight[rows].float().numpy().reshape(-1, GROUP).T)
        scale, minimum, moved = _fitted(values)
        codes[rows] = _rounded(values, scale, minimum).T.reshape(-1, inputs)
        most = np.maximum(values.max(axis=0), -values.min(axis=0))
        for whole, part in ((scales, scale), (minimums, minimum), (greatest, most), (lost, moved)):
            whole[rows] = part.reshape(-1, inputs // GROUP)

    _by_rows(quantize, outputs, inputs)
    _finite(greatest)
    if not (np.isfinite(scales).all() and np.isfinite(minimums).all()):
        raise ValueError(f"its groups' scales or minimums in 4 bits are beyond {_MOST_OF_16_BITS:,}; {WAY_OUT}")
    allowed = np.maximum(greatest * _OF_A_GROUP, scales * _OF_A_STEP)
    if (lost > np.maximum(allowed, greatest.mean() * _OF_ALL_GROUPS)).any():
        raise ValueError(f"its weights are so small that the scales of 4 bits, which have 16 bits, cannot tell them apart; {WAY_OUT}")
    return QuantizedWeight(4, torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(minimums))


def _by_rows(quantize: Callable[[slice], None], outputs: int, inputs: int) -> None:
    """Calls `quantize` for all rows, so many at a time, on as many threads as torch has. numpy's operations run beside each other, and
    threads that meet only at the end do not mind a busy core, as torch's do with a barrier after each operation.
    """
    step = max(1, _AT_ONCE // inputs)
    pieces = [slice(at, min(at + step, outputs)) for at in range(0, outputs, step)]

    def piece(rows: slice) -> None:
        with np.errstate(all="ignore"):  # what is not finite is refused once all scales are known
            quantize(rows)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(piece, pieces))


def _fitted(values: Floats) -> tuple[Floats, Floats, Floats]:
    """The scale and minimum [N] of groups in columns [GROUP, N], and by how much 16 bits for these move a weight at most [N]."""
    low, high, total = values.min(axis=0), values.max(axis=0), _sum(values)
    middle, kept = (low + high) / 2, None
    for span in _SPANS:
        half = (high - low) * np.float32(span / 2)
        codes = _rounded(values, half * np.float32(2 / _INT4_MOST), middle - half)
        wanted, least = _least_squares(values, codes, total)
        scale, minimum = _of_16_bits(wanted), _of_16_bits(least)
        moved = np.abs(scale - wanted) * np.float32(_INT4_MOST) + np.abs(minimum - least)
        codes *= scale
        codes += minimum
        codes -= values
        codes *= codes
        error = _sum(codes)
        if kept is None:
            kept = [error, scale, minimum, moved]
        else:
            better = error < kept[0]
            kept = [np.where(better, new, old) for new, old in zip((error, scale, minimum, moved), kept, strict=True)]
    assert kept is not None
    return kept[1], kept[2], kept[3]


def _of_16_bits(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _least_squares(values: Floats, codes: Floats, total: Floats) -> tuple[Floats, Floats]:
    """The scale and minimum [N] by which `codes` [GROUP, N] come closest to `values`, whose sums are `total` [N]."""
    first, second = _sum(codes), _sum(codes * codes)
    spread = GROUP * second - first * first
    # Codes that are all alike tell no scale: it is zero, and the minimum is their mean.
    told = (GROUP * _sum(codes * values) - first * total) / _divisor(spread)
    scale: Floats = np.where(spread > 0, told, 0).astype(np.float32)
    return scale, np.divide(total - scale * first, GROUP, dtype=np.float32)


def _rounded(values: Floats, scale: Floats, minimum: Floats) -> Floats:
    """Codes 0 to 15 as floats."""
    codes = values - minimum
    codes /= _divisor(scale)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, _INT4_MOST, out=codes)


def _divisor(scale: Floats) -> Floats:
    """The scale, or 1 where it is zero."""
    return np.where(scale == 0, np.float32(1), scale)


def _sum(values: Floats) -> Floats:
    """Sums of columns [GROUP, N], halves added to each other until one row is left: numpy's own order is nobody's promise."""
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    total: Floats = values[0]
    return total


def _finite(values: Floats) -> torch.Tensor:
    if not np.isfinite(values).all():
        raise ValueError("weights that are not finite cannot be quantised")
    return torch.from_numpy(values)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Blocks [N, 18]: a float16 scale, then codes of which 8 is zero, the first half of the block in the low four bits."""
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, scales * np.float32(-8)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Blocks [N, 20]: a scale and a minimum in float16, then codes as in Q4_0."""
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Blocks [N, 144] of eight groups: float16 factors of scales and minimums, these in 6 bits, and two groups' codes to 32 bytes."""
    scales, minimums = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, GROUP))
    factors = _halves(blocks[:, :4])
    return codes, factors[:, :1] * scales, -(factors[:, 1:] * minimums)


def _halves(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Codes [N, 2 B] of bytes [N, B]: the low halves, then the high ones."""
    codes = np.empty((packed.shape[0], 2, packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, 0])
    np.right_shift(packed, 4, out=codes[:, 1])
    return codes.reshape(packed.shape[0], -1)


# Types whose blocks are groups of GROUP inputs in 4 bits.
_BLOCKS: Mapping[GGMLQuantizationType, Callable[[Bytes], tuple[Bytes, Floats, Floats]]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}


def has_groups(stored: StoredTensor) -> bool:
    """Whether `from_blocks` takes it."""
    return stored.kind in _BLOCKS and stored.data.ndim == 2


def from_blocks(stored: StoredTensor) -> QuantizedWeight:
    """A weight of a GGUF in 4 bits as it is stored, exactly: no code is rounded again.

    Scales and minimums of Q4_K are products of 16 and 6 bits: a kernel whose layout has 16 bits for them rounds these (by 2^-11 at most).

    Raises KeyError for another type than has_groups knows, ValueError for a weight that is not finite.
    """
    outputs = stored.data.shape[0]
    block_bytes = gguf.GGML_QUANT_SIZES[stored.kind][1]
    with np.errstate(all="ignore"):
        codes, scales, minimums = _BLOCKS[stored.kind](stored.data.reshape(-1, block_bytes))
    return QuantizedWeight(
        bits=4,
        codes=torch.from_numpy(codes.view(np.int8).reshape(outputs, -1)),
        scales=_finite(scales.reshape(outputs, -1)),
        minimums=_finite(minimums.reshape(outputs, -1)),
    )
