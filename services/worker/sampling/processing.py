"""Logits processors over a batch, in their fixed order: what a row asks for changes that row alone.

    1. allowed_token_ids   all other ids are forbidden
    2. bad_words           ids that would complete one are forbidden
    3. logit_bias          added
    4. min_tokens          ids that would end the output are forbidden while it is too short
    5. penalties           repetition (divides or multiplies), then frequency and presence (subtracted)
    6. the operator's      in the order of `load_processors`
    7. the grammar's mask

What is forbidden is minus infinity and no later step brings it back, so 2 and 4 are one step here. The mask wins over bans: where those
(the operator's, too) leave nothing that the grammar allows, the grammar counts alone, among the allowed_token_ids, which ban nothing but
say what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.sampling.custom import run_custom
from services.worker.sampling.mask import FORBIDDEN, apply_mask, constrained_rows
from services.worker.sampling.rows import NO_EDITS, NO_INTEGERS, Bias, CustomRow, Integers, Penalized, Points, SamplingRows

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Processed:
    """Logits as they are to be sampled, and rows that are not: `dead` (no id is left), `failed` (by the operator's code); bool[R]."""

    logits: torch.Tensor
    dead: npt.NDArray[np.bool_]
    failed: npt.NDArray[np.bool_]


def needs_processing(rows: SamplingRows, mask: torch.Tensor | None) -> bool:
    """Whether any logit may change before tokens are taken."""
    return mask is not None or rows.edits is not NO_EDITS or bool(rows.banned_rows.size)


def process(logits: torch.Tensor, rows: SamplingRows, mask: torch.Tensor | None, finite: npt.NDArray[np.bool_]) -> Processed:
    """Applies what `rows` ask for to `logits` ([R, V], in place if they are float32) and then `mask` (see `sample`).

    A row that was not `finite` (bool[R]) is neither dead nor failed, whatever becomes of it.
    """
    constrained = constrained_rows(mask) if mask is not None else NO_INTEGERS
    edits, bans = rows.edits, Points(rows.banned_rows, rows.banned_ids)
    if edits is NO_EDITS and not bans.rows.size and not constrained.size:
        nothing = np.zeros_like(finite)
        return Processed(logits, nothing, nothing)
    logits = logits.float()
    banning = np.union1d(bans.rows, np.asarray([row.row for row in edits.custom], np.int64))
    contested = np.intersect1d(constrained, banning)
    keep_only(logits, edits.allowed_rows, edits.allowed)
    before = logits[_tensor(contested, logits)]
    add_bias(logits, edits.bias)
    forbid(logits, bans)
    penalize(logits, edits.penalized)
    failed = _run_customs(logits, edits.custom, finite)
    if mask is not None and constrained.size:
        apply_mask(logits, constrained, mask)
        _let_the_grammar_win(logits, contested, before, mask)
    narrowed = np.unique(np.concatenate([constrained, banning, edits.allowed_rows]))
    dead = np.zeros_like(finite)
    dead[narrowed] = _empty(logits)[narrowed]
    return Processed(logits, dead & finite & ~failed, failed)


def keep_only(logits: torch.Tensor, rows: Integers, allowed: Points) -> None:
    """Forbids all ids of `rows` but those `allowed`."""
    if rows.size:
        index = _index(allowed, logits)
        kept = logits[index]
        logits[_tensor(rows, logits)] = FORBIDDEN
        logits[index] = kept


def forbid(logits: torch.Tensor, points: Points) -> None:
    """Forbids ids; a point may stand there twice."""
    if points.rows.size:
        logits[_index(points, logits)] = FORBIDDEN


def add_bias(logits: torch.Tensor, bias: Bias) -> None:
    """Adds to logits."""
    if bias.values.size:
        logits[_index(bias.points, logits)] += _tensor(bias.values, logits)


def penalize(logits: torch.Tensor, penalized: Penalized) -> None:
    """Repetition penalty (Keskar et al., "CTRL", 2019, also for negative logits, which it multiplies), then frequency and presence.

    A logit that the first would drive out of float32's range becomes its largest or smallest number: it forbids nothing.
    """
    if not penalized.counts.size:
        return
    index, counts = _index(penalized.points, logits), _tensor(penalized.counts, logits)
    repetition, old = _tensor(penalized.repetition, logits), logits[index]
    new = torch.where(old > 0, old / repetition, old * repetition).clamp(-_LARGEST, _LARGEST)
    new -= _tensor(penalized.frequency, logits) * counts
    new -= _tensor(penalized.presence, logits) * (counts > 0)
    logits[index] = torch.where(old == FORBIDDEN, old, new)


def _run_customs(logits: torch.Tensor, rows: Sequence[CustomRow], finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Runs the operator's processors row by row; returns the rows on which one has failed, after which no further one sees the row."""
    failed = np.zeros_like(finite)
    for row in rows:
        if finite[row.row] and not failed[row.row]:
            failed[row.row] = not run_custom(row, logits[row.row])
    return failed


def _let_the_grammar_win(logits: torch.Tensor, contested: Integers, before: torch.Tensor, mask: torch.Tensor) -> None:
    """Where bans and mask left nothing of a row that was `before` ([len(contested), V]) the bans, the mask alone is applied."""
    empty = np.flatnonzero(_empty(logits)[contested]) if contested.size else contested
    if empty.size:
        logits[_tensor(contested[empty], logits)] = before[_tensor(empty, logits)]
        apply_mask(logits, contested[empty], mask)


def _empty(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Rows without any id that may be sampled; bool[R]."""
    return (logits.amax(dim=1) == FORBIDDEN).cpu().numpy()


def _index(points: Points, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _tensor(points.rows, logits), _tensor(points.ids, logits)


def _tensor(values: npt.NDArray[Any], logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
