"""Weights of integers for tests, made from floats in the plainest way."""

from __future__ import annotations

import torch

from services.worker.ops.quantized import GROUP, QuantizedWeight


def per_channel(weight: torch.Tensor) -> QuantizedWeight:
    """8 bits, one scale for each output."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return QuantizedWeight(8, (weight / scales).round().to(torch.int8), scales, None)


def grouped(weight: torch.Tensor, *, minimums: bool = False) -> QuantizedWeight:
    """4 bits in groups of GROUP inputs, as GGUF's Q4_0 or Q4_1 (`minimums`); scales and minimums are exact in 16 bits."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = _exact((groups.amax(2) - groups.amin(2)) / 15)
    least = groups.amin(2).half().float() if minimums else -8 * scales
    codes = ((groups - least[:, :, None]) / scales[:, :, None]).round().clamp(0, 15)
    return QuantizedWeight(4, codes.to(torch.int8).view_as(weight), scales, least)


def _exact(scales: torch.Tensor) -> torch.Tensor:
    return scales.clamp(min=1e-4).half().float()
