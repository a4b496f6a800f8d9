"""What the sampled rows of a step ask for, as arrays over the whole batch; nothing here changes a logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Token ids that belong to a slot: an operator's processor may read them.
Ids = npt.NDArray[np.int32]
# An operator's processor of one request; see docs/logits-processors.md.
RowProcessor = Callable[[Ids, Ids, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Points:
    """N logits: id `ids[i]` of row `rows[i]`, both int64[N]."""

    rows: Integers
    ids: Integers


@dataclass(frozen=True, slots=True)
class Bias:
    """`values` (float32[N]) are added to the logits at `points`, of which none stands here twice."""

    points: Points
    values: Floats


@dataclass(frozen=True, slots=True)
class Penalized:
    """Ids that stand in a row's output, or in its prompt where its `repetition` is not 1; parallel arrays of N entries, no point twice.

    counts       float32: how often the output holds the id (0: only the prompt does)
    repetition, frequency, presence   float32: the penalties of the point's row
    """

    points: Points
    counts: Floats
    repetition: Floats
    frequency: Floats
    presence: Floats


@dataclass(frozen=True, slots=True)
class CustomRow:
    """An operator's processor that row `row` is to be given to, with the ids that it may read.

    `process` is the exception that it raised when the request was opened, if it did.
    """

    row: int
    request: str
    name: str
    process: RowProcessor | Exception
    prompt_ids: Ids
    output_ids: Ids


@dataclass(frozen=True, slots=True)
class Edits:
    """What rows ask for beyond filters and bans. `allowed_rows` may sample nothing but their ids in `allowed`."""

    allowed_rows: Integers
    allowed: Points
    bias: Bias
    penalized: Penalized
    custom: tuple[CustomRow, ...] = ()


NO_INTEGERS: Integers = np.empty(0, np.int64)
NO_FLOATS: Floats = np.empty(0, np.float32)
NO_POINTS = Points(NO_INTEGERS, NO_INTEGERS)
# Of rows that ask for no edits.
NO_EDITS = Edits(
    allowed_rows=NO_INTEGERS,
    allowed=NO_POINTS,
    bias=Bias(NO_POINTS, NO_FLOATS),
    penalized=Penalized(NO_POINTS, NO_FLOATS, NO_FLOATS, NO_FLOATS, NO_FLOATS),
)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the sampled rows, parallel arrays of R entries; see common.v1.SamplingParams for units and what zero means.

    `banned_rows`, `banned_ids`: pairs (row, id) that must not be sampled (bad_words, min_tokens). Ids are below the vocabulary's size, here
    and in `edits`.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    choices: npt.NDArray[np.uint64]
    output_indices: npt.NDArray[np.uint64]
    banned_rows: npt.NDArray[np.int64]
    banned_ids: npt.NDArray[np.int64]
    edits: Edits = NO_EDITS


def points_of(ids_by_row: Sequence[tuple[int, npt.NDArray[np.integer[Any]]]]) -> Points:
    """The points of several rows, one after the other."""
    if not ids_by_row:
        return NO_POINTS
    rows = np.repeat(np.asarray([row for row, _ in ids_by_row], np.int64), [ids.size for _, ids in ids_by_row])
    return Points(rows, np.concatenate([ids for _, ids in ids_by_row]).astype(np.int64))


def within(points: Points, vocab_size: int) -> tuple[Points, npt.NDArray[np.bool_]]:
    """The points whose ids can be sampled, and which of all they are (bool[N])."""
    kept = points.ids < vocab_size
    return Points(points.rows[kept], points.ids[kept]), kept
