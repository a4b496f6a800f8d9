"""Weights as the C++ products read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.weight_memory import WeightMemory

PANEL = 32


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight in panels of 32 outputs, [panels, inputs, 32], and its bias, padded alike; see linear.h.

    outputs  columns of the product's result; where `gated`, half as many as the weight's
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int
    gated: bool


def paired(tensor: torch.Tensor) -> torch.Tensor:
    """[2 I, ...], gates and then what they gate, as [panels * 32, ...]: 16 gates, then their 16 partners, and so on; zero beyond the last.

    For a weight, its bias, or anything that it has for each output. Raises TokenloomError(UNSUPPORTED) for an odd number of them.
    """
    if tensor.shape[0] % 2:
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"gates and what they gate in {tensor.shape[0]} outputs")
    half, rest = tensor.shape[0] // 2, tensor.shape[1:]
    panels = -(-half // (PANEL // 2))
    filled = tensor.new_zeros(2, panels * (PANEL // 2), *rest)
    filled[:, :half] = tensor.reshape(2, half, *rest)
    return filled.view(2, panels, PANEL // 2, *rest).transpose(0, 1).reshape(panels * PANEL, *rest)


def check_bias(bias: torch.Tensor | None, outputs: int) -> None:
    """Raises TokenloomError(UNSUPPORTED) for a bias that is not float32 [outputs] of the weight, both halves of a gated one."""
    if bias is not None and (bias.dtype is not torch.float32 or bias.shape != (outputs,)):
        raise TokenloomError(
            ErrorCode.UNSUPPORTED, f"the C++ kernels take a bias of float32 [{outputs}], not {bias.dtype} {list(bias.shape)}"
        )


def pack(weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory, *, gated: bool = False) -> Panels:
    """Copies a float32 weight [out, in] into panels in `memory`; outputs beyond the last are zero.

    Raises TokenloomError(UNSUPPORTED) and MemoryError.
    """
    if weight.dtype is not torch.float32:
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"the C++ kernels take weights of float32, not {weight.dtype}")
    outputs, inputs = weight.shape
    check_bias(bias, outputs)
    if gated:
        outputs, weight, bias = outputs // 2, paired(weight), None if bias is None else paired(bias)
    missing = -weight.shape[0] % PANEL
    if missing:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
    panels = memory.copy(weight.reshape(-1, PANEL, inputs).transpose(1, 2))
    return Panels(panels, None if bias is None else bias.contiguous(), outputs, inputs, gated)
