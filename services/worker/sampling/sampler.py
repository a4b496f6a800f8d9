"""Batched sampling: each row has its own parameters, and no Python runs for a row that asks for no processor.

Logits processors and the grammar's mask come first (see `processing`), then temperature, filters and the draw (see `picking`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.sampling.draws import uniforms
from services.worker.sampling.picking import Picker, PickRows, pick
from services.worker.sampling.processing import needs_processing, process
from services.worker.sampling.rows import SamplingRows


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of R rows: `tokens` int64[R]; where `finite` is false, or `dead` or `failed` is true, a row's token means nothing.

    finite  bool[R]: the model's logits were
    dead    bool[R]: they were, and processors and grammar left no id to sample
    failed  bool[R]: they were, and the operator's processor raised
    """

    tokens: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    dead: npt.NDArray[np.bool_]
    failed: npt.NDArray[np.bool_]


def sample(logits: torch.Tensor, rows: SamplingRows, vocab_size: int, mask: torch.Tensor | None = None, picker: Picker = pick) -> Sampled:
    """One token below `vocab_size` per row of `logits` (floating, [R, at least vocab_size]; changed where rows ask for it).

    `mask`: what each row's grammar allows, int32[R, at least ceil(vocab_size / 32)] on the CPU: bit i % 32 (lowest first) of word i // 32
    stands for id i; rows without a grammar have all bits set (-1). None: no row has a grammar. It is applied after all else and wins:
    where the bans leave nothing that the grammar allows, the grammar counts alone. `picker`: the executor's own way to take the tokens.
    """
    if logits.shape[1] > vocab_size:
        logits = logits[:, :vocab_size]
    params = PickRows(rows.temperature, rows.top_k, rows.top_p, rows.min_p, _uniforms(rows))
    if not needs_processing(rows, mask):
        picked = picker(logits, params)
        nothing = np.zeros_like(picked.finite)
        return Sampled(picked.tokens, picked.finite, nothing, nothing)
    finite = picker(logits, params, np.zeros(logits.shape[0], np.bool_)).finite
    processed = process(logits, rows, mask, finite)
    sound = finite & ~(processed.dead | processed.failed)
    return Sampled(picker(processed.logits, params, sound).tokens, finite, processed.dead, processed.failed)


def _uniforms(rows: SamplingRows) -> npt.NDArray[np.float64]:
    """The rows' draws; zeros where none is drawn."""
    if not rows.temperature.any():
        return np.zeros_like(rows.temperature)
    return uniforms(rows.seeds, rows.choices, rows.output_indices)
