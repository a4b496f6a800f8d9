"""The operations in plain torch, run eagerly: the oracle that every other executor is tested against.

Rows' independence (PROTOCOL.md rule 15). Everything here but the matrix product computes a token from that token alone, in an order that
does not depend on the others. MKL's product picks other kernels for fewer than 12 rows (measured on AVX-512: M = 4, 8 and every M >= 12
give bit-identical rows; 1-3, 5-7 and 9-11 differ from them). With `batch_invariant` smaller products are padded to 8 or 12 rows.
That costs nothing from two rows on (M = 8 takes 47 ms, M = 2 takes 50) and a third to a half at M = 1 (30 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.worker.ops.base import Forward, HeadShape, LayerCache, PackedLinear, Step, StepInputs
from services.worker.ops.quantized import QuantizedWeight, Weight
from services.worker.sampling.picking import Picker, pick

_PADDED_ROWS = (8, 12)


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] as it is, and its bias [out]; `gated` as in Ops."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool = False


class ReferenceOps:
    """See the module and Ops."""

    name = "reference"

    def __init__(self, *, batch_invariant: bool = True) -> None:
        self._padded_rows = _PADDED_ROWS if batch_invariant else ()
        self._headed: tuple[torch.Tensor, Linear] | None = None

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None, *, gated: bool = False) -> PackedLinear:
        """See Ops: nothing to prepare. Integers become the floats that they stand for: activations stay floats here."""
        floats = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        return Linear(floats.contiguous(), bias, gated)

    def bind(self, forward: Forward, cache: Sequence[LayerCache], max_tokens: int) -> Step:
        """See Ops: each step runs the model's Python."""
        return _Eager(self, forward, cache)

    def picker(self) -> Picker:
        """See Ops."""
        return pick

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return functional.embedding(token_ids, weight)

    def linear(self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See Ops."""
        product = self._product(x, packed)
        if packed.gated:
            gate, up = product.chunk(2, dim=-1)
            product = functional.silu(gate) * up
        return product if residual is None else residual + product

    def _product(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        """x times the weight, plus the bias; see the module about padding."""
        rows = x.shape[0]
        padded = next((size for size in self._padded_rows if rows <= size), rows)
        if padded == rows:
            return functional.linear(x, packed.weight, packed.bias)
        wide = x.new_zeros(padded, x.shape[1])
        wide[:rows] = x
        return functional.linear(wide, packed.weight, packed.bias)[:rows]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See Ops; in float32."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
        return weight * scaled.to(x.dtype)

    def rope_and_cache(
        self, qkv: torch.Tensor, rotations: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape
    ) -> torch.Tensor:
        """See Ops; rotation in float32."""
        split = qkv.view(qkv.shape[0], heads.query_heads + 2 * heads.kv_heads, heads.head_dim)
        rotated, values = split[:, : -heads.kv_heads], split[:, -heads.kv_heads :]
        half = heads.head_dim // 2
        angles = rotations[inputs.positions][:, None, :]
        cosines, sines = angles[..., :half], angles[..., half:]
        first, second = rotated[..., :half].float(), rotated[..., half:].float()
        rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(qkv.dtype)
        block_size = cache.keys.shape[2]
        blocks, offsets = inputs.cache_slots // block_size, inputs.cache_slots % block_size
        cache.keys[blocks, :, offsets] = rotated[:, heads.query_heads :]
        cache.values[blocks, :, offsets] = values
        return rotated[:, : heads.query_heads]

    def attention(self, queries: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float) -> torch.Tensor:
        """See Ops; row after row, softmax in float32."""
        starts, lengths = inputs.query_starts.tolist(), inputs.kv_lengths.tolist()
        block_size = cache.keys.shape[2]
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for row, length in enumerate(lengths):
            rows = slice(starts[row], starts[row + 1])
            table = inputs.block_tables[row, : -(-length // block_size)].long()
            keys, values = (_sequence(part[table], length, heads) for part in (cache.keys, cache.values))
            scores = torch.einsum("tqd,lqd->qtl", queries[rows].float(), keys.float()) * scale
            positions = inputs.positions[rows]
            future = torch.arange(length, device=queries.device)[None, :] > positions[:, None]
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            output[rows] = _weighted(weights, values.float(), positions).to(queries.dtype)
        return output.view(queries.shape[0], -1)

    def pick(self, x: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """See Ops: x itself, so that `head_again` finds all tokens."""
        return x

    def head(self, x: torch.Tensor, sampled: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See Ops."""
        self._headed = x, packed
        return self.linear(x[sampled], packed).float()

    def head_again(self, picked: torch.Tensor) -> torch.Tensor:
        """The head that ran last over other tokens of its x: float32 [S, vocabulary]. Raises ValueError before the first."""
        if self._headed is None:
            raise ValueError("no step has run yet")
        x, packed = self._headed
        return self.linear(x[picked], packed).float()


class _Eager:
    """A model's Python as a Step."""

    def __init__(self, ops: ReferenceOps, forward: Forward, cache: Sequence[LayerCache]) -> None:
        self._ops, self._forward, self._cache = ops, forward, cache

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """See Step."""
        logits: torch.Tensor = self._forward(inputs, self._cache)
        return logits

    def again(self, picked: torch.Tensor) -> torch.Tensor:
        """See Step."""
        return self._ops.head_again(picked)

    def settle(self) -> None:
        """See Step: torch's threads have no cores of their own."""


def _sequence(blocks: torch.Tensor, length: int, heads: HeadShape) -> torch.Tensor:
    """Gathered blocks [N, K, block size, D] as one sequence for every query head: [length, Q, D]."""
    flat = blocks.transpose(1, 2).reshape(-1, heads.kv_heads, heads.head_dim)[:length]
    return flat.repeat_interleave(heads.query_heads // heads.kv_heads, dim=1)


def _weighted(weights: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sums [T, Q, D] of values [length, Q, D] by weights [Q, T, length].

    Where a value is not finite, each token takes its own positions alone: zero times it is NaN, which no earlier token may see.
    """
    if torch.isfinite(values).all():
        return torch.einsum("qtl,lqd->tqd", weights, values)
    seen = [position + 1 for position in positions.tolist()]
    return torch.stack([torch.einsum("ql,lqd->qd", weights[:, token, :end], values[:end]) for token, end in enumerate(seen)])
