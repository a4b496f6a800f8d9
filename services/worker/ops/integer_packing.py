"""Weights of integers as the C++ products read them; the layouts are those of kernels/cpu/integer_linear.h."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch.nn import functional

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.packing import PANEL, check_bias, paired
from services.worker.ops.quantized import GROUP, QuantizedWeight
from services.worker.ops.weight_memory import WeightMemory

# Floats that 32 activations take once they are integers: kernels.h's kQuantizedGroup.
QUANTIZED_GROUP = GROUP // 4 + 3
_STEPS = GROUP // 4
# What rounding to 16 bits changes of a normal number, at most: a part of itself.
_ROUNDING = 2.0**-11


class Format(enum.IntEnum):
    """Layouts; the numbers are those of kernels.h's IntegerFormat."""

    CHANNEL8 = 0
    GROUP4 = 1


@dataclass(frozen=True, slots=True)
class IntegerPanels:
    """A weight in panels of 32 outputs, uint8 [panels, bytes of one], and its bias, padded alike.

    outputs  columns of the product's result; where `gated`, half as many as the weight's
    """

    format: Format
    panels: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int
    gated: bool

    @property
    def quantized_width(self) -> int:
        """Floats that a row of its inputs takes once they are integers."""
        return -(-self.inputs // GROUP) * QUANTIZED_GROUP


def pack_integers(weight: QuantizedWeight, bias: torch.Tensor | None, memory: WeightMemory, *, gated: bool = False) -> IntegerPanels:
    """Copies a weight into panels in `memory`. Scales and minimums of groups are rounded to 16 bits: those of Q4_0 and Q4_1 have no more,
    those of Q4_K change by up to 2^-11 of themselves.

    Raises TokenloomError(UNSUPPORTED) for what the kernels have no layout of, and for scales that 16 bits do not hold; MemoryError.
    """
    outputs, inputs = weight.shape
    chosen = _format(weight)
    check_bias(bias, outputs)
    filled = paired if gated else _padded
    codes, scales = filled(weight.codes), filled(weight.scales)
    groups = _groups(functional.pad(codes, (0, -inputs % GROUP)), chosen)
    if chosen is Format.CHANNEL8:
        behind = _bytes(scales.float().view(-1, PANEL))
        panels = torch.cat((groups.flatten(1), behind), dim=1)
    else:
        minimums = torch.zeros_like(scales) if weight.minimums is None else filled(weight.minimums)
        panels = torch.cat((groups, _halves(scales), _halves(minimums)), dim=2).flatten(1)
    padded = None if bias is None else filled(bias).contiguous()
    return IntegerPanels(chosen, memory.copy(panels), padded, outputs // (1 + gated), inputs, gated)


def _format(weight: QuantizedWeight) -> Format:
    (_, inputs), groups = weight.shape, weight.scales.shape[1]
    if weight.bits == 8 and weight.minimums is None and groups == 1:
        return Format.CHANNEL8
    if weight.bits != 4:
        raise _refused(f"{weight.bits} bits in {groups} groups{'' if weight.minimums is None else ' with minimums'}")
    if groups * GROUP != inputs:
        raise _refused(f"{groups} groups of {inputs} inputs; they take groups of {GROUP}")
    return Format.GROUP4


def _groups(codes: torch.Tensor, chosen: Format) -> torch.Tensor:
    """Codes [outputs, inputs] as bytes of groups, [panels, groups, bytes]: step after step of four inputs."""
    panels = codes.shape[0] // PANEL
    steps = codes.view(panels, PANEL, -1, _STEPS, 4).permute(0, 2, 3, 1, 4)
    if chosen is Format.GROUP4:
        low, high = steps.to(torch.uint8).chunk(2, dim=3)
        stored = low | high << 4
    else:
        stored = steps.contiguous().view(torch.uint8) ^ 128
    return stored.reshape(panels, codes.shape[1] // GROUP, -1)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [outputs, groups] in 16 bits, as bytes [panels, groups, 64]."""
    halves = numbers.half()
    if not torch.isfinite(halves).all():
        raise _refused("scales or minimums beyond 65,504; --quantization int8 takes them")
    # Numbers without an implicit one are kept where they are exact, as a GGUF's own are, those of Q4_K's products too.
    if ((halves.float() - numbers).abs() > numbers.abs() * _ROUNDING).any():
        raise _refused("scales or minimums too small for 16 bits; --quantization int8 takes them")
    return _bytes(halves.view(-1, PANEL, numbers.shape[1]).transpose(1, 2))


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _padded(part: torch.Tensor) -> torch.Tensor:
    """[outputs, ...] with zeros up to the last panel's end."""
    missing = -part.shape[0] % PANEL
    return functional.pad(part, (0, missing) if part.dim() == 1 else (0, 0, 0, missing))


def _refused(what: str) -> TokenloomError:
    return TokenloomError(ErrorCode.UNSUPPORTED, f"the C++ kernels cannot multiply by weights of integers with {what}")
