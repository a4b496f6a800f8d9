"""The token of each row, once nothing more changes its logits: greedy, or drawn after temperature and filters.

The order of the filters is vLLM's:

    1. greedy rows  argmax, ties to the lowest id; done
    2. temperature  logits / temperature
    3. min_p        only ids at least min_p times as probable as the best
    4. top_k        only the k best; all that tie with the k-th stay
    5. top_p        the smallest set of the best whose probability, among what is left, reaches top_p; ties with the last one stay
    6. draw         the first id, in the order of ids, whose cumulative probability exceeds u * total (PROTOCOL.md rule 13)

Probabilities are float64 and are summed one after the other, so that a row's result does not depend on the rows beside it. `pick` does it
in torch, for any executor; the CPU executor's own (ops/native.py) takes a tenth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bools = npt.NDArray[np.bool_]

# A row whose nucleus lies within this many best ids needs no sort of the whole vocabulary.
_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class PickRows:
    """Parameters of R rows, arrays of R entries: see common.v1.SamplingParams for what zero means. `uniforms` are the draws, in [0, 1)."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniforms: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Picked:
    """`tokens` int64[R]; `finite` bool[R]: whether all of a row's logits are."""

    tokens: npt.NDArray[np.int64]
    finite: Bools


class Picker(Protocol):
    """What takes a token from each row."""

    def __call__(self, logits: torch.Tensor, rows: PickRows, sound: Bools | None = None) -> Picked:
        """One token per row of `logits` (floating, [R, V]; not changed). `sound`: rows that are to be drawn from, bool[R]; of others, and
        where it is None of those that are not finite, the token means nothing. Logits of minus infinity are never drawn."""
        ...


def pick(logits: torch.Tensor, rows: PickRows, sound: Bools | None = None) -> Picked:
    """See Picker."""
    # Both extremes carry a NaN along; asking each logit took four times as long as the argmax.
    finite = (torch.isfinite(logits.amax(dim=1)) & torch.isfinite(logits.amin(dim=1))).cpu().numpy()
    tokens = logits.argmax(dim=1).cpu().numpy()
    filtered = ((rows.top_k > 0) & (rows.top_k < logits.shape[1])) | (rows.top_p < 1)
    drawn = (rows.temperature > 0) & (finite if sound is None else sound)
    for group, with_cut in ((np.flatnonzero(drawn & ~filtered), False), (np.flatnonzero(drawn & filtered), True)):
        if group.size:
            picked = logits[torch.from_numpy(group).to(logits.device)] if group.size < finite.size else logits
            tokens[group] = _draw(picked.double(), rows, group, with_cut)
    return Picked(tokens, finite)


def _draw(logits: torch.Tensor, rows: PickRows, group: npt.NDArray[np.int64], with_cut: bool) -> npt.NDArray[np.int64]:
    """Steps 2 to 6 for the rows `group`, whose logits (float64) are given. `with_cut`: top_k or top_p is in use."""
    logits = logits / _column(rows.temperature[group], logits)
    weights = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
    min_p = rows.min_p[group]
    if min_p.any():
        weights = torch.where(weights >= _column(min_p, weights), weights, 0.0)
    if with_cut:
        weights = torch.where(weights >= _thresholds(weights, rows.top_k[group], rows.top_p[group]), weights, 0.0)
    cumulative = weights.cumsum(dim=1)
    u = _column(rows.uniforms[group], weights)
    chosen = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]
    # u * total can round up to total itself: then it is the last id that has any probability, the first to reach the total.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(chosen, last).cpu().numpy()


def _thresholds(weights: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """The least weight that stays after top_k and top_p, one per row ([R, 1]); ids that tie with it stay too.

    Looks at a few best ids first; only rows whose nucleus is wider are sorted whole (4 ms a row for 49,152 ids).
    """
    width = weights.shape[1]
    k, p = _column(top_k, weights), _column(top_p, weights)
    k = torch.where(k > 0, k.clamp(max=width), width)
    total = weights.cumsum(dim=1)[:, -1:]
    threshold, settled = _cut(torch.topk(weights, min(_CANDIDATES, width), dim=1).values, k, p, total, width)
    rest = torch.nonzero(~settled[:, 0])[:, 0]
    if rest.numel():
        best = weights[rest].sort(dim=1, descending=True).values
        threshold[rest] = _cut(best, k[rest], p[rest], total[rest], width)[0]
    return threshold


def _cut(best: torch.Tensor, k: torch.Tensor, p: torch.Tensor, total: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The thresholds as seen from each row's best weights in falling order [R, C], and whether C of them were enough to know ([R, 1] each).

    `total` is the weight of all `width` ids; where k cuts within the C best, what is left sums to their first k.
    """
    shown = best.shape[1]
    cumulative = best.cumsum(dim=1)
    within = k <= shown
    left = torch.where(within, cumulative.gather(1, k.clamp(max=shown) - 1), total)
    kept = ((cumulative - best) < p * left).sum(dim=1, keepdim=True).clamp(min=1)
    kept = torch.minimum(kept, k)
    settled = within | ((k >= width) & (cumulative[:, -1:] >= p * left))
    return best.gather(1, kept.clamp(max=shown) - 1).clamp(min=torch.finfo(torch.float64).tiny), settled


def _column(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))[:, None].to(like.device)
