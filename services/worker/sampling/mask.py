"""The grammar's mask: the last word on what a row may sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

FORBIDDEN = float("-inf")
_WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of 32 ids that a row of the mask has."""
    return -(-vocab_size // _WORD_BITS)


def constrained_rows(mask: torch.Tensor) -> npt.NDArray[np.int64]:
    """Rows (int64) of `mask` (int32[R, at least ceil(vocabulary / 32)], on the CPU) that forbid anything: not all of their bits are set."""
    return np.flatnonzero((mask.numpy() != -1).any(axis=1))


def allowed_ids(mask: torch.Tensor, rows: npt.NDArray[np.int64], vocab_size: int) -> torch.Tensor:
    """bool[len(rows), vocab_size] on the CPU: bit i % 32 of word i // 32, lowest first, says whether id i is allowed."""
    words = np.ascontiguousarray(mask.numpy()[rows, : mask_words(vocab_size)])
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
    return torch.from_numpy(bits).bool()


def apply_mask(logits: torch.Tensor, rows: npt.NDArray[np.int64], allowed: torch.Tensor) -> None:
    """Forbids in `logits` ([R, V], in place) what is not `allowed` (bool[len(rows), V]) in `rows`; all of it may be gone then."""
    index = torch.from_numpy(rows).to(logits.device)
    logits[index] = torch.where(allowed.to(logits.device), logits[index], FORBIDDEN)
