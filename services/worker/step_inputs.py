"""Tensors of one step, built from staged rows: the flattened tokens of all rows, and the parameters of those that are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from libs.blocks import BLOCK_SIZE, blocks_for
from services.worker.ops.base import StepInputs
from services.worker.sampling.rows import NO_EDITS, Points, SamplingRows, points_of, within
from services.worker.sampling.steering import SteeredRow, edits_of
from services.worker.slots import Slot, StagedRow


def build_inputs(rows: Sequence[StagedRow]) -> StepInputs:
    """The step's inputs on the CPU; see StepInputs for shapes."""
    counts = np.array([row.count for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    lengths = starts + counts
    longest = int(lengths.max())
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(query_starts[-1])) - (query_starts[:-1] - starts)[row_of_token]
    tables = np.stack([row.slot.blocks[: blocks_for(longest)] for row in rows])
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


def _bans(slots: Sequence[Slot], steered: Sequence[SteeredRow], vocab_size: int) -> Points:
    """Ids that must not be sampled now: those that would end an output that is too short, and those that would complete a bad word."""
    short = [(index, slot.endings) for index, slot in enumerate(slots) if slot.output_length < slot.sampling.min_tokens]
    worded = [(item.row, item.steering.bad_words.banned(item.output_ids)) for item in steered if item.steering.bad_words is not None]
    return within(points_of([*short, *worded]), vocab_size)[0]
