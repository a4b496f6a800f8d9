"""Weights as the C++ products read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.quantized import QuantizedWeight, Weight

PANEL = 32


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [outputs, inputs] in panels of 32 outputs, [panels, inputs, 32], and its bias, padded alike; see linear.h."""

    panels: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int


def pack(weight: Weight, bias: torch.Tensor | None) -> Panels:
    """Copies a float32 weight [outputs, inputs] into panels; outputs beyond the last are zero. Raises TokenloomError(UNSUPPORTED)."""
    if isinstance(weight, QuantizedWeight):
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"the C++ kernels have no products of {weight.bits} bits; --kernels reference has")
    if weight.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"the C++ kernels take weights of float32, not {weight.dtype}")
    outputs, inputs = weight.shape
    missing = -outputs % PANEL
    if missing:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
    panels = weight.view(-1, PANEL, inputs).transpose(1, 2).contiguous()
    return Panels(panels, None if bias is None else bias.contiguous(), outputs, inputs)
