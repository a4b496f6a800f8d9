"""The operations on CPUs, in C++ (services/worker/kernels/cpu): float32 only.

Rows' independence (PROTOCOL.md rule 15) holds by construction: every sum has one order, whatever the number of rows, tiles and threads,
so that a product needs no padding to be the same in every batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from services.worker.ops.base import HeadShape, LayerCache, PackedLinear, StepInputs
from services.worker.ops.cpu_kernels import CpuKernels, pack


class CpuOps:
    """See the module and Ops."""

    name = "cpu"

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """See Ops."""
        return pack(weight, bias)

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return functional.embedding(token_ids, weight)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See Ops."""
        out = torch.empty(x.shape[0], packed.outputs)
        self._kernels.linear(out, x, packed)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        self._kernels.add_norm(normed, total, x, residual, weight, epsilon)
        return normed, total

    def rope_and_cache(
        self, qkv: torch.Tensor, rotations: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape
    ) -> torch.Tensor:
        """See Ops."""
        queries = torch.empty(qkv.shape[0], heads.query_heads, heads.head_dim)
        self._kernels.rope_cache(queries, qkv, rotations, cache, inputs, heads)
        return queries

    def attention(self, queries: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float) -> torch.Tensor:
        """See Ops."""
        output = torch.empty(queries.shape[0], heads.query_heads * heads.head_dim)
        self._kernels.attention(output, queries, cache, inputs, heads, scale)
        return output

    def gated_activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.activation(out, gate_up)
        return out

    def head(self, x: torch.Tensor, sampled: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See Ops."""
        return self.linear(x[sampled], packed)
