"""The grammar's mask in `sample`: last of all, and stronger than bans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.sampling.mask import mask_words
from services.worker.sampling.sampler import sample
from tests.unit.worker.test_sampler import VOCABULARY, rows


def grammar(*allowed: set[int] | None, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """The bits of what each row allows; None: a row without a grammar."""
    words = np.zeros((len(allowed), mask_words(vocabulary)), np.uint32)
    for row, ids in enumerate(allowed):
        if ids is None:
            words[row] = 0xFFFFFFFF
        for token in ids or ():
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_samples_only_what_its_grammar_allows_and_its_neighbours_do_not_notice(temperature: float):
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5))
    table = rows(3, temperature=temperature)
    free = sample(logits.clone(), table, VOCABULARY)
    for token in (0, 31, 32, VOCABULARY - 1):
        masked = sample(logits.clone(), table, VOCABULARY, grammar(None, {token}, None))
        assert masked.tokens.tolist() == [free.tokens[0], token, free.tokens[2]]
        assert not masked.dead.any()


def test_among_what_is_allowed_the_probabilities_keep_their_proportions():
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1, 0.0001]])).repeat(20_000, 1)
    tokens = sample(logits, rows(20_000), 4, grammar(*[{1, 2}] * 20_000, vocabulary=4)).tokens
    assert set(tokens.tolist()) == {1, 2}
    assert abs(float((tokens == 1).mean()) - 0.75) < 0.02


def test_the_grammar_wins_over_bans_that_leave_it_nothing():
    logits = torch.full((2, VOCABULARY), -5.0)
    logits[:, 7], logits[:, 9] = 5.0, 6.0
    sampled = sample(logits, rows(2, temperature=0.0, banned=[(0, 7), (0, 9), (1, 9)]), VOCABULARY, grammar({7, 9}, {7, 9}))
    assert sampled.tokens.tolist() == [9, 7], "all of the first row's are banned: then the bans do not count"
    assert not sampled.dead.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_allows_nothing_is_a_dead_end_of_its_row_alone(temperature: float):
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(5))
    alone = sample(logits[1:].clone(), rows(1, seeds=[1], temperature=temperature), VOCABULARY).tokens[0]
    sampled = sample(logits, rows(2, temperature=temperature), VOCABULARY, grammar(set(), None))
    assert sampled.dead.tolist() == [True, False]
    assert sampled.finite.all()
    assert sampled.tokens[1] == alone


def test_logits_that_are_not_finite_are_no_dead_end():
    logits = torch.zeros(2, VOCABULARY)
    logits[0] = float("nan")
    sampled = sample(logits, rows(2), VOCABULARY, grammar(set(), {3}))
    assert sampled.finite.tolist() == [False, True]
    assert not sampled.dead.any()
    assert sampled.tokens[1] == 3


def test_ids_that_only_the_mask_knows_are_never_sampled():
    logits = torch.full((1, VOCABULARY + 40), 50.0)
    wide = grammar({5, VOCABULARY + 3}, vocabulary=VOCABULARY + 40)
    assert sample(logits, rows(1), VOCABULARY, wide).tokens.tolist() == [5]
