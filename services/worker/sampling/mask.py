"""The grammar's mask: the last word on what a row may sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

FORBIDDEN = float("-inf")
_WORD_BITS = 32
# For each value of a byte, what its eight bits (lowest first) add to a logit: nothing, or what forbids it. An addition has no branches:
# for 32 rows of 49,152 ids it takes 0.5 ms, where choosing by a mask as irregular as that of a JSON string took 7.
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, FORBIDDEN).astype(np.float32)


def mask_words(vocab_size: int) -> int:
    """Words of 32 ids that a row of the mask has."""
    return -(-vocab_size // _WORD_BITS)


def constrained_rows(mask: torch.Tensor) -> npt.NDArray[np.int64]:
    """Rows (int64) of `mask` (int32[R, at least ceil(vocabulary / 32)], on the CPU) that forbid anything: not all of their bits are set."""
    return np.flatnonzero((mask.numpy() != -1).any(axis=1))


def apply_mask(logits: torch.Tensor, rows: npt.NDArray[np.int64], mask: torch.Tensor) -> None:
    """Forbids in `rows` of `logits` (float32[R, V], in place) what their grammar does not allow; all ids of a row may be gone then.

    In `mask` bit i % 32 of word i // 32, lowest first, says whether id i is allowed.
    """
    for row in rows.tolist():
        words = mask[row].numpy().astype("<i4", copy=False)
        added = _ADDED.take(words.view(np.uint8), axis=0).reshape(-1)[: logits.shape[1]]
        logits[row] += torch.from_numpy(added).to(logits.device)
