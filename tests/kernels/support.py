"""Ragged steps with caches to compute on, and a small model family written against Ops."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.ops.base import Forward, HeadShape, LayerCache, Ops, StepInputs, Value
from services.worker.ops.reference import ReferenceOps
from services.worker.ops.weight_memory import WeightMemory

BLOCK = 16
POSITIONS = 512
SMALL = HeadShape(4, 2, 16)
# Written against Ops: an operation under test, given the step's inputs and one layer's cache.
Operation = Callable[[Ops, StepInputs, LayerCache], Value]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(blocks: int, heads: HeadShape) -> LayerCache:
    """A cache in which everything that is not written is NaN, so that a read of it shows."""
    keys = torch.full((blocks, heads.kv_heads, heads.head_dim, BLOCK), float("nan")).transpose(2, 3)
    return LayerCache(keys, torch.full((blocks, heads.kv_heads, BLOCK, heads.head_dim), float("nan")))


def at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, contiguous, behind whose last byte lies a page that must not be touched: whoever reads on ends the process."""
    size = tensor.numel() * tensor.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    guard = ctypes.c_void_p(memory.data_ptr() + whole)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0  # PROT_NONE
    return memory[whole - size : whole].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class GuardedMemory(WeightMemory):
    """Puts each weight at the end of what may be read."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return at_the_end(tensor)


@dataclass(frozen=True)
class Sequences:
    """Token ids of several sequences and the blocks they own, dealt out shuffled."""

    ids: list[np.ndarray]
    tables: list[np.ndarray]
    num_blocks: int

    def step(self, rows: Sequence[tuple[int, int, int]], sampled: Sequence[int] | None = None) -> StepInputs:
        """Inputs of a step of rows (sequence, tokens before, tokens now). `sampled`: tokens of the step; None: the last of each row."""
        counts = np.array([count for _, _, count in rows])
        starts = np.cumsum([0, *counts])
        width = max(-(-(start + count) // BLOCK) for _, start, count in rows)
        tables = np.full((len(rows), width), -7, np.int32)  # what lies beyond a row's blocks must not be looked at
        slots = []
        for at, (which, start, count) in enumerate(rows):
            used = -(-(start + count) // BLOCK)
            tables[at, :used] = self.tables[which][:used]
            positions = np.arange(start, start + count)
            slots.append(self.tables[which][positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK)
        return StepInputs(
            token_ids=torch.from_numpy(np.concatenate([self.ids[which][start : start + count] for which, start, count in rows])),
            positions=torch.from_numpy(np.concatenate([np.arange(start, start + count) for _, start, count in rows])),
            cache_slots=torch.from_numpy(np.concatenate(slots)),
            query_starts=torch.from_numpy(starts.astype(np.int32)),
            kv_lengths=torch.tensor([start + count for _, start, count in rows], dtype=torch.int32),
            block_tables=torch.from_numpy(tables),
            sampled=torch.tensor(starts[1:] - 1 if sampled is None else sampled, dtype=torch.int64),
        )


def sequences(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> Sequences:
    random = np.random.default_rng(seed)
    needs = [-(-length // BLOCK) for length in lengths]
    blocks = random.permutation(sum(needs) + 3).astype(np.int32)
    ends = np.cumsum([0, *needs])
    tables = [blocks[ends[at] : ends[at + 1]] for at in range(len(needs))]
    return Sequences([random.integers(0, vocabulary, length) for length in lengths], tables, sum(needs) + 3)


def one_row_each(tokens: int) -> StepInputs:
    """A step in which token i has id i, for operations that look at nothing but their rows."""
    indices = torch.arange(tokens)
    return StepInputs(
        token_ids=indices,
        positions=torch.zeros(tokens, dtype=torch.int64),
        cache_slots=torch.zeros(tokens, dtype=torch.int64),
        query_starts=torch.arange(tokens + 1, dtype=torch.int32),
        kv_lengths=torch.ones(tokens, dtype=torch.int32),
        block_tables=torch.zeros(tokens, 1, dtype=torch.int32),
        sampled=indices,
    )


def apply(ops: Ops, operation: Callable[[Ops, Value], Value], x: torch.Tensor) -> torch.Tensor:
    """The operation on x [T, width], which enters the program as the table of an embedding."""

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        return operation(ops, ops.embedding(inputs.token_ids, x))

    return ops.bind(forward, [], x.shape[0])(one_row_each(x.shape[0])).clone()


@dataclass(frozen=True)
class Shapes:
    """A small model. `inner`: columns of the gated activation."""

    heads: HeadShape = SMALL
    hidden: int = 48
    inner: int = 40
    vocabulary: int = 70
    layers: int = 2
    bias: bool = False
    tied: bool = False
    picks: bool = True  # whether the last layer goes on with the sampled tokens alone


def family(ops: Ops, shapes: Shapes, seed: int = 0) -> Forward:
    """A model family of its own: written against Ops, random weights, rows of odd sizes. It needs no C++ of its own."""
    heads, hidden = shapes.heads, shapes.hidden
    seeds = iter(range(seed * 1000, seed * 1000 + 1000))

    def weight(out: int, into: int) -> torch.Tensor:
        return randn(out, into, seed=next(seeds)) / into**0.5

    def packed(out: int, into: int, gated: bool = False) -> Value:
        return ops.pack_linear(weight(out, into), randn(out, seed=next(seeds)) if shapes.bias else None, gated=gated)

    queries = heads.query_heads * heads.head_dim
    layers = [
        {
            "qkv": packed(queries + 2 * heads.kv_heads * heads.head_dim, hidden),
            "output": packed(hidden, queries),
            "gate_up": packed(2 * shapes.inner, hidden, gated=True),
            "down": packed(hidden, shapes.inner),
            "norm": randn(hidden, seed=next(seeds)),
        }
        for _ in range(shapes.layers)
    ]
    table = randn(shapes.vocabulary, hidden, seed=next(seeds))
    rotations = randn(POSITIONS, heads.head_dim, seed=next(seeds))
    head = ops.pack_linear(table if shapes.tied else weight(shapes.vocabulary, hidden), None)

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        x = ops.embedding(inputs.token_ids, table)
        for layer, layer_cache in zip(layers, cache, strict=True):
            qkv = ops.linear(ops.norm(x, layer["norm"], 1e-5), layer["qkv"])
            rotated = ops.rope_and_cache(qkv, rotations, layer_cache, inputs, heads)
            attended = ops.attention(rotated, layer_cache, inputs, heads, heads.head_dim**-0.5)
            if shapes.picks and layer is layers[-1]:
                attended, x = ops.pick(attended, inputs.sampled), ops.pick(x, inputs.sampled)
            x = ops.linear(attended, layer["output"], residual=x)
            x = ops.linear(ops.linear(ops.norm(x, layer["norm"], 1e-5), layer["gate_up"]), layer["down"], residual=x)
        return ops.head(ops.norm(x, layers[0]["norm"], 1e-5), inputs.sampled, head)

    return forward


class Running:
    """A model bound to an executor and a cache of its own."""

    def __init__(self, ops: Ops, shapes: Shapes, blocks: int, seed: int = 0) -> None:
        self.cache = [empty_cache(blocks, shapes.heads) for _ in range(shapes.layers)]
        self.run = ops.bind(family(ops, shapes, seed), self.cache, POSITIONS * 64)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """The step's result, kept."""
        return self.run(inputs).clone()


REFERENCE = ReferenceOps()
