"""Log-probabilities of tokens: raw, from the model's own logits, before any logits processor, temperature or filter.

A token's log-probability is its logit less the logarithm of the sum of all ids' exponentials; its rank is 1 + the number of ids whose logit
is greater; alternatives are listed in falling order, ties by the lowest id. Only rows that ask pay: their logits are copied before
processors change them, and a prompt's are computed again after the step, a bounded piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from libs.logprobs import PackedLogprobs
from services.worker.ops.base import MOST_AGAIN, Step
from services.worker.slots import StagedRow


@dataclass(frozen=True, slots=True)
class Kept:
    """The logits of the sampled rows that ask: float32 [A, V], whose they are among all that are sampled, and A alternatives wanted."""

    logits: torch.Tensor
    places: npt.NDArray[np.int64]
    alternatives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Of a row of the batch: log-probabilities of prompt positions from `first` on."""

    row: int
    first: int
    logprobs: PackedLogprobs


def keep(logits: torch.Tensor, rows: Sequence[StagedRow], vocab_size: int) -> Kept | None:
    """Copies the logits [S, at least vocab_size] of those of the sampled `rows` that ask for log-probabilities; None: nobody does."""
    asked = [row.slot.sampling.logprobs for row in rows if row.sample]
    if all(wanted is None for wanted in asked):
        return None
    places = np.array([place for place, wanted in enumerate(asked) if wanted is not None], np.int64)
    copied = logits[torch.from_numpy(places).to(logits.device), :vocab_size].float()
    return Kept(copied, places, tuple(wanted for wanted in asked if wanted is not None))


def of_tokens(kept: Kept, tokens: npt.NDArray[np.int64]) -> Iterator[tuple[int, PackedLogprobs]]:
    """The place of each row that asked among the sampled, and one position: the token that it drew (`tokens`: int64 [S] of all)."""
    ids, values, ranks = _look_up(kept.logits, tokens[kept.places], max(kept.alternatives))
    for index, (place, wanted) in enumerate(zip(kept.places.tolist(), kept.alternatives, strict=True)):
        one = slice(index, index + 1)
        yield place, _packed(ids[one, : wanted + 1], values[one, : wanted + 1], ranks[one])


def of_prompts(step: Step, rows: Sequence[StagedRow], vocab_size: int) -> list[Told]:
    """What `rows`, which `step` has just computed in this order, tell of their prompts: position p's logits are those of token p - 1.

    A row over tokens start .. end tells positions start + 1 .. end, as far as the prompt reaches, and the first one, which is undefined.
    """
    told, offset = [], 0
    for row in rows:
        wanted, length = row.slot.sampling.prompt_logprobs, row.slot.prompt_length
        if wanted is not None and (row.start < length - 1 or not row.start):
            told.append(_of_prompt(step, row, offset, wanted, vocab_size))
        offset += row.count
    return told


def _of_prompt(step: Step, row: StagedRow, offset: int, wanted: int, vocab_size: int) -> Told:
    tokens, first = row.slot.tokens, row.start + 1
    end = min(row.start + row.count + 1, row.slot.prompt_length)
    logprobs = PackedLogprobs(wanted)
    if not row.start:
        logprobs.extend(_undefined(int(tokens[0]), wanted))
    for at in range(first, end, MOST_AGAIN):
        targets = tokens[at : min(at + MOST_AGAIN, end)].astype(np.int64)
        picked = torch.arange(targets.size) + (offset + at - first)
        logprobs.extend(_packed(*_look_up(step.again(picked)[:, :vocab_size], targets, wanted)))
    return Told(row.index, first if row.start else 0, logprobs)


def _undefined(token: int, wanted: int) -> PackedLogprobs:
    ids = np.zeros((1, wanted + 1), np.int64)
    ids[0, 0] = token
    return _packed(ids, np.full((1, wanted + 1), np.nan), np.zeros(1, np.int64))


def _packed(ids: npt.NDArray[np.int64], values: npt.NDArray[np.float64], ranks: npt.NDArray[np.int64]) -> PackedLogprobs:
    told = bytearray(values.astype("<f4").tobytes())
    return PackedLogprobs(ids.shape[1] - 1, bytearray(ids.astype("<u4").tobytes()), told, ranks.tolist())


def _look_up(
    logits: torch.Tensor, tokens: npt.NDArray[np.int64], wanted: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Ids and values [N, 1 + wanted] and ranks [N] of N rows of `logits` [N, V]: each row's token first, then the `wanted` best."""
    given = torch.from_numpy(tokens).to(logits.device)[:, None]
    own = logits.gather(1, given)
    ranks = 1 + (logits > own).sum(dim=1)
    total = logits.logsumexp(dim=1, keepdim=True).double()
    ids, found = given, own
    if wanted:
        best, best_ids = top(logits, wanted)
        ids, found = torch.cat((given, best_ids), dim=1), torch.cat((own, best), dim=1)
    return ids.cpu().numpy(), (found.double() - total).cpu().numpy(), ranks.cpu().numpy()


def top(logits: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `wanted` greatest values of each row [N, V] in falling order, and their ids; of equal ones the lowest ids."""
    best, ids = torch.topk(logits, wanted, dim=1)
    # topk takes any of those that are equal to the last one; where not all of them are in, they are chosen by hand.
    for row in torch.nonzero((logits >= best[:, -1:]).sum(dim=1) > wanted)[:, 0].tolist():
        candidates = torch.nonzero(logits[row] >= best[row, -1])[:, 0]
        order = logits[row, candidates].sort(descending=True, stable=True).indices[:wanted]
        best[row], ids[row] = logits[row, candidates[order]], candidates[order]
    ids, order = ids.sort(dim=1)
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, ids.gather(1, order)
