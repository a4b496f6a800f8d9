"""An engine that is asked for log-probabilities, and transformers' answer to the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from libs.logprobs import PackedLogprobs, TokenLogprobs
from services.worker.batch import Row
from services.worker.engine import Engine, Executed
from services.worker.slots import SlotTable
from tests.unit.worker.helpers import GREEDY, batch, opening, row

CLOSE = 5e-4


@torch.inference_mode()
def distributions(theirs: LlamaForCausalLM, tokens: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Log-probabilities [T, vocabulary] behind each of the tokens."""
    return theirs(torch.tensor([list(tokens)])).logits[0, :, :vocabulary].float().log_softmax(dim=-1)


def check_told(entries: Iterable[TokenLogprobs], tokens: Sequence[int], expected: torch.Tensor, wanted: int) -> None:
    """That each token is told as the reference tells it; ids may change places only where their probabilities are too close to call."""
    for entry, token, known in zip(entries, tokens, expected, strict=True):
        best = known.topk(max(wanted, 1)).values
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(known[token]), abs=CLOSE)
        assert int((known > known[token] + CLOSE).sum()) < entry.rank <= 1 + int((known > known[token] - CLOSE).sum())
        assert len(entry.top_ids) == len(entry.top_logprobs) == wanted
        np.testing.assert_allclose(entry.top_logprobs, best[:wanted], atol=CLOSE)
        np.testing.assert_allclose([float(known[other]) for other in entry.top_ids], entry.top_logprobs, atol=CLOSE)


class Bench:
    """Slots on an engine; each sequence owns its blocks from the start. `told`: prompt positions by slot, as they came."""

    def __init__(self, engine: Engine, blocks: int = 8) -> None:
        self.engine = engine
        self.slots = SlotTable(engine.limits, ())
        self.blocks = blocks
        self.told: dict[int, PackedLogprobs] = {}

    def step(self, *rows: tuple[int, int, bool], opens: Sequence[tuple[int, Sequence[int], dict]] = ()) -> Executed:
        """Rows (slot, count, sample); opens (slot, prompt, sampling)."""
        opened = [
            opening(slot, prompt, blocks=range(slot * self.blocks, (slot + 1) * self.blocks), sampling=replace(GREEDY, **sampling))
            for slot, prompt, sampling in opens
        ]
        wanted: list[Row] = [row(slot, count, sample=sample) for slot, count, sample in rows]
        staged = self.slots.stage(batch(*wanted, opens=opened))
        executed = self.engine.execute(staged.rows)
        self.slots.commit(staged, executed.tokens)
        for told in executed.told:
            slot = rows[told.row][0]
            known = self.told.setdefault(slot, PackedLogprobs(told.logprobs.alternatives))
            assert told.first == len(known)
            known.extend(told.logprobs)
        return executed
