"""What a model may ask of an executor: six fused operations over the flattened tokens of one step.

A step is ragged: the rows of a batch lie one after the other without padding, prefill chunks and decodes alike.

    rows        |   A: 5 tokens of a prompt   | B: 1 | C: 1 | D: 3 tokens |
    tokens T    | a4  a5  a6  a7  a8          | b9   | c2   | d0  d1  d2  |
    query_starts  0                             5      6      7             10

Shapes: T tokens, R rows, S sampled rows, H hidden size, D head size, Q query heads, K KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.worker.ops.quantized import Weight
from services.worker.sampling.picking import Picker


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's rows as tensors on the device."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    cache_slots: torch.Tensor  # int64 [T]: block * block size + offset, where the token's K and V go
    query_starts: torch.Tensor  # int32 [R + 1]: the row's first token
    kv_lengths: torch.Tensor  # int32 [R]: tokens of the sequence up to and with this step's
    block_tables: torch.Tensor  # int32 [R, blocks of the longest row]
    sampled: torch.Tensor  # int64 [S]: tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer: `keys` and `values`, each [blocks, K, block size, D]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of a layer: query heads, KV heads (a divisor), size of each."""

    query_heads: int
    kv_heads: int
    head_dim: int


# A weight as its executor keeps it; only the Ops that packed it can read it.
PackedLinear = Any

# What flows between operations: a tensor, or its stand-in while an executor records the model. Models pass it on and look at nothing in it.
Value = Any

# A model's step over its cache, written against Ops: logits, float32 [S, vocabulary].
Forward = Callable[[StepInputs, Sequence[LayerCache]], Value]

# Most tokens whose logits `Step.again` gives at a time: with 49,152 ids they take 25 MB.
MOST_AGAIN = 128


class Step(Protocol):
    """A model bound to an executor and a cache."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Computes one step: logits, float32 [S, vocabulary], of its `sampled` tokens, valid until the next call of either kind."""
        ...

    def again(self, picked: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [S, vocabulary], of other tokens of the step that ran last: `picked`, int64 [S], at most MOST_AGAIN. Each row
        has the bits it would have had if the step had been asked for it. Valid as long as those of the step.
        """
        ...

    def settle(self) -> None:
        """The calling thread runs all steps from now on: it takes its core, where the executor's threads have cores of their own."""
        ...


class Ops(Protocol):
    """The operations. Activations have the executor's dtype; no operation changes its inputs unless it says so."""

    name: str

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None, *, gated: bool = False) -> PackedLinear:
        """Prepares a weight [out, in], floats or integers, and a bias [out] for `linear`; called while loading.

        gated: the weight is [2 I, in], gates first and then as many outputs that they gate. Raises TokenloomError(UNSUPPORTED).
        """
        ...

    def bind(self, forward: Forward, cache: Sequence[LayerCache], max_tokens: int) -> Step:
        """Makes `forward` a function of the step's inputs alone, for steps of at most `max_tokens` tokens; called once, after loading.

        The step's logits are valid until the next step. Raises TokenloomError(UNSUPPORTED) for what the executor cannot run.
        """
        ...

    def picker(self) -> Picker:
        """What takes tokens from a step's logits."""
        ...

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> Value:
        """Rows [T, H] of `weight` [vocabulary, H]."""
        ...

    def linear(self, x: Value, packed: PackedLinear, residual: Value | None = None) -> Value:
        """x [T, in] times the packed weight, plus its bias: [T, out]; of a gated weight silu(gate) * up, [T, I] (Shazeer 2020).

        residual: added to that at last; not to a gated one's.
        """
        ...

    def norm(self, x: Value, weight: torch.Tensor, epsilon: float) -> Value:
        """RMS norm (Zhang, Sennrich 2019) of x [T, H]."""
        ...

    def rope_and_cache(self, qkv: Value, rotations: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape) -> Value:
        """Rotates queries and keys (Su et al. 2021, halves paired), writes K and V into the cache; returns queries [T, Q, D].

        `qkv` is [T, (Q + 2 K) * D]; `rotations` float32 [positions, D]: cosines of the D / 2 angles, then sines.
        """
        ...

    def attention(self, queries: Value, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float) -> Value:
        """Causal attention of each row over its own blocks, which already hold this step's K and V: [T, Q * D]."""
        ...

    def pick(self, x: Value, sampled: torch.Tensor) -> Value:
        """x [T, H] of the tokens `sampled` alone, [S, H], for what follows the last attention: nothing else of it is read.

        An executor may return x itself and compute the rest for nobody. What is picked goes with picked values and to `head`.
        """
        ...

    def head(self, x: Value, sampled: torch.Tensor, packed: PackedLinear) -> Value:
        """Logits, float32 [S, vocabulary], of the tokens `sampled` of x [T, H], or of x as picked before."""
        ...
