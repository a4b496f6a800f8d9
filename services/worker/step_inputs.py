"""Tensors of one step, built from staged rows: the flattened tokens of all rows, and the parameters of those that are sampled."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from libs.blocks import BLOCK_SIZE, blocks_for
from services.worker.ops.base import StepInputs
from services.worker.sampling.rows import NO_EDITS, Points, SamplingRows, points_of, within
from services.worker.sampling.steering import SteeredRow, edits_of
from services.worker.slots import Slot, StagedRow


def build_inputs(rows: Sequence[StagedRow]) -> StepInputs:
    """The step's inputs on the CPU; see StepInputs for shapes."""
    if all(row.count == 1 for row in rows):
        return _of_single_tokens(rows)
    counts = np.array([row.count for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    lengths = starts + counts
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(query_starts[-1])) - (query_starts[:-1] - starts)[row_of_token]
    tables = _tables(rows, int(lengths.max()))
    cache_slots = tables[row_of_token, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = np.concatenate([row.slot.tokens[row.start : row.start + row.count] for row in rows]).astype(np.int64)
    sampled = np.array([query_starts[index + 1] - 1 for index, row in enumerate(rows) if row.sample], np.int64)
    return StepInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        cache_slots=torch.from_numpy(cache_slots),
        query_starts=torch.from_numpy(query_starts.astype(np.int32)),
        kv_lengths=torch.from_numpy(lengths.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        sampled=torch.from_numpy(sampled),
    )


def _of_single_tokens(rows: Sequence[StagedRow]) -> StepInputs:
    """The inputs of rows that compute a token each, as in nearly every step: with a third of the calls. Between two forward passes, which
    leave nothing in the caches, calls are what costs."""
    starts = [row.start for row in rows]
    blocks = [int(row.slot.blocks[row.start // BLOCK_SIZE]) for row in rows]
    cache_slots = [block * BLOCK_SIZE + start % BLOCK_SIZE for block, start in zip(blocks, starts, strict=True)]
    positions = np.array(starts, np.int64)
    return StepInputs(
        token_ids=torch.from_numpy(np.array([row.slot.tokens[row.start] for row in rows], np.int64)),
        positions=torch.from_numpy(positions),
        cache_slots=torch.from_numpy(np.array(cache_slots, np.int64)),
        query_starts=torch.from_numpy(np.arange(len(rows) + 1, dtype=np.int32)),
        kv_lengths=torch.from_numpy((positions + 1).astype(np.int32)),
        block_tables=torch.from_numpy(_tables(rows, max(starts) + 1)),
        sampled=torch.from_numpy(np.array([index for index, row in enumerate(rows) if row.sample], np.int64)),
    )


def _tables(rows: Sequence[StagedRow], longest: int) -> npt.NDArray[np.int32]:
    """The rows' block ids [R, blocks of `longest` tokens]; of a single row those that its slot has."""
    width = blocks_for(longest)
    if len(rows) == 1:
        return rows[0].slot.blocks[None, :width]
    return np.stack([row.slot.blocks[:width] for row in rows])


def build_mask(rows: Sequence[StagedRow], vocab_size: int) -> torch.Tensor | None:
    """What the constraints of the rows that are sampled allow, int32[R, ceil(vocab_size / 32)] (see sample); None: no row has one."""
    constrained = [row.slot.progress for row in rows if row.sample]
    if not any(progress is not None for progress in constrained):
        return None
    words = np.full((len(constrained), -(-vocab_size // 32)), -1, np.int32)
    for index, progress in enumerate(constrained):
        if progress is not None:
            progress.fill(words[index])
    return torch.from_numpy(words)


def build_sampling(rows: Sequence[StagedRow], vocab_size: int) -> SamplingRows:
    """Parameters of the rows that are sampled, in order, and what those among them that ask for logits processors want of these."""
    slots = [row.slot for row in rows if row.sample]
    params = [slot.sampling for slot in slots]
    steered = [
        SteeredRow(index, slot.request, slot.steering, slot.prompt_ids, slot.output_ids)
        for index, slot in enumerate(slots)
        if slot.steering is not None
    ]
    bans = _bans(slots, steered, vocab_size)
    return SamplingRows(
        temperature=np.array([item.temperature for item in params], np.float64),
        top_k=np.array([item.top_k for item in params], np.int64),
        top_p=np.array([item.top_p for item in params], np.float64),
        min_p=np.array([item.min_p for item in params], np.float64),
        seeds=np.array([item.seed for item in params], np.uint64),
        choices=np.array([item.choice_index for item in params], np.uint64),
        output_indices=np.array([slot.output_length for slot in slots], np.uint64),
        banned_rows=bans.rows,
        banned_ids=bans.ids,
        edits=edits_of(steered, vocab_size) if steered else NO_EDITS,
    )


class KeptSampling:
    """`build_sampling` of one step after the other: while the same rows are sampled, only their outputs' lengths change. For one thread."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._built: SamplingRows | None = None

    def build(self, rows: Sequence[StagedRow], vocab_size: int) -> SamplingRows:
        """See build_sampling; valid until the next call."""
        slots = [row.slot for row in rows if row.sample]
        if self._built is not None and len(slots) == len(self._slots) and all(map(operator.is_, slots, self._slots)):
            self._built.output_indices[:] = [slot.output_length for slot in slots]
            return self._built
        built = build_sampling(rows, vocab_size)
        lasting = all(slot.steering is None and slot.output_length >= slot.sampling.min_tokens for slot in slots)
        self._slots, self._built = (slots, built) if lasting else ([], None)
        return built


def _bans(slots: Sequence[Slot], steered: Sequence[SteeredRow], vocab_size: int) -> Points:
    """Ids that must not be sampled now: those that would end an output that is too short, and those that would complete a bad word."""
    short = [(index, slot.endings) for index, slot in enumerate(slots) if slot.output_length < slot.sampling.min_tokens]
    worded = [(item.row, item.steering.bad_words.banned(item.output_ids)) for item in steered if item.steering.bad_words is not None]
    return within(points_of([*short, *worded]), vocab_size)[0]
