"""The operations on CPUs: the reference's, with attention in C++ (see kernels/cpu/attention.cpp)."""

from __future__ import annotations

import torch

from services.worker.kernels.cpu.library import CpuKernels
from services.worker.ops.base import HeadShape, LayerCache, StepInputs
from services.worker.ops.reference import ReferenceOps


class CpuOps(ReferenceOps):
    """Float32 only."""

    name = "cpu"

    def __init__(self, kernels: CpuKernels, *, batch_invariant: bool = True) -> None:
        super().__init__(batch_invariant=batch_invariant)
        self._kernels = kernels

    def attention(self, queries: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float) -> torch.Tensor:
        """See Ops. Each query's sums run in the order of positions, in runs of one block, whatever else is in the step."""
        output = torch.empty(queries.shape[0], heads.query_heads * heads.head_dim)
        self._kernels.attention(output, queries.contiguous(), cache, inputs, heads, scale)
        return output
