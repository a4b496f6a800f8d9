"""A weight as integers, in its natural order: what a loader makes and an executor packs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Inputs that share a scale in grouped weights: what GGUF's Q4_0, Q4_1 and Q8_0 blocks hold.
GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs]: `scales * codes + minimums`, each scale and minimum for `inputs / groups` neighbouring inputs.

    codes     int8 [outputs, inputs]; of 8 bits -127 to 127, of 4 bits 0 to 15
    scales    float32 [outputs, groups]; one group where the scale is the whole output channel's, else groups of GROUP inputs
    minimums  float32 [outputs, groups]; None: 0 (symmetric)
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dequantized(self) -> torch.Tensor:
        """The weight that the integers stand for, float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        groups = self.codes.view(outputs, self.scales.shape[1], -1).float()
        values = groups * self.scales[:, :, None]
        if self.minimums is not None:
            values += self.minimums[:, :, None]
        return values.view(outputs, inputs)


# What a model hands to `Ops.pack_linear`.
Weight = torch.Tensor | QuantizedWeight


def stacked(parts: list[Weight]) -> Weight:
    """Weights of several products over the same input as one. Raises ValueError where they are of different kinds."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    kinds = {(part.bits, part.scales.shape[1], part.minimums is None) for part in quantized}
    if tensors or len(kinds) != 1:
        raise ValueError("weights of one product are quantised in different ways")
    minimums = [part.minimums for part in quantized if part.minimums is not None]
    return QuantizedWeight(
        bits=quantized[0].bits,
        codes=torch.cat([part.codes for part in quantized]),
        scales=torch.cat([part.scales for part in quantized]),
        minimums=torch.cat(minimums) if minimums else None,
    )
