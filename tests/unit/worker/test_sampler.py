from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.sampling.draws import uniforms
from services.worker.sampling.rows import SamplingRows
from services.worker.sampling.sampler import sample

VOCABULARY = 600


def rows(count: int, **columns: object) -> SamplingRows:
    """Parameters of `count` rows: temperature 1, everything else off, seeds 0, 1, 2 ...; columns may be numbers or lists."""
    defaults: dict[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "choices": 0, "output_indices": 0}
    types = {"top_k": np.int64, "seeds": np.uint64, "choices": np.uint64, "output_indices": np.uint64}
    values = {"seeds": list(range(count)), **defaults, **columns}
    banned = values.pop("banned", [])
    arrays = {name: np.broadcast_to(np.asarray(value, types.get(name, np.float64)), count).copy() for name, value in values.items()}
    pairs = np.asarray(banned, np.int64).reshape(-1, 2)
    return SamplingRows(**arrays, banned_rows=pairs[:, 0], banned_ids=pairs[:, 1])


def one_by_one(logits: np.ndarray, parameters: SamplingRows, index: int) -> int:
    """The documented order of filters, written out for one row with plain loops."""
    scaled = logits.astype(np.float64) / parameters.temperature[index]
    weights = np.exp(scaled - scaled.max())
    weights[weights < parameters.min_p[index]] = 0
    k, p = int(parameters.top_k[index]), parameters.top_p[index]
    if 0 < k < weights.size:
        weights[weights < np.sort(weights)[-k]] = 0
    if p < 1:
        kept, total = 0.0, weights.sum()
        for value in np.sort(weights)[::-1]:
            threshold = value
            kept += value
            if kept >= p * total:
                break
        weights[weights < threshold] = 0
    u = float(
        uniforms(parameters.seeds[index : index + 1], parameters.choices[index : index + 1], parameters.output_indices[index : index + 1])[
            0
        ]
    )
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


parameter_rows = st.tuples(
    st.sampled_from([0.2, 0.7, 1.0, 1.8]),
    st.sampled_from([0, 1, 3, 50, 256, 300, VOCABULARY]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.integers(0, 2**64 - 1),
)


@settings(deadline=None, max_examples=60)
@given(parameters=st.lists(parameter_rows, min_size=1, max_size=8), seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1.0, 6.0]))
def test_a_batch_gives_what_each_row_gives_alone_and_what_the_definition_says(parameters, seed, spread):
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((len(parameters), VOCABULARY)) * spread).astype(np.float32)
    temperature, top_k, top_p, min_p, seeds = (list(column) for column in zip(*parameters, strict=True))
    table = rows(len(parameters), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=np.asarray(seeds, np.uint64))
    together = sample(torch.from_numpy(logits), table, VOCABULARY).tokens.tolist()
    for index in range(len(parameters)):
        single = rows(
            1,
            temperature=temperature[index],
            top_k=top_k[index],
            top_p=top_p[index],
            min_p=min_p[index],
            seeds=np.asarray([seeds[index]], np.uint64),
        )
        assert sample(torch.from_numpy(logits[index : index + 1]), single, VOCABULARY).tokens[0] == together[index]
        assert one_by_one(logits[index], table, index) == together[index]


def test_temperature_zero_takes_the_best_and_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [7, 300]] = 4.0
    assert sample(logits, rows(2, temperature=0.0), VOCABULARY).tokens.tolist() == [7, 0]


def test_ids_beyond_the_tokenizers_are_never_sampled():
    logits = torch.zeros(400, VOCABULARY + 40)
    logits[:, VOCABULARY:] = 100.0
    tokens = sample(logits, rows(400, temperature=[0.0] * 200 + [1.0] * 200), VOCABULARY).tokens
    assert tokens.max() < VOCABULARY


def test_banned_ids_are_not_sampled_and_only_in_their_row():
    logits = torch.full((2, VOCABULARY), -5.0)
    logits[:, 9] = 5.0
    tokens = sample(logits, rows(2, temperature=0.0, banned=[(0, 9)]), VOCABULARY).tokens
    assert tokens[0] != 9
    assert tokens[1] == 9


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_reported_and_spoils_no_other(bad: float):
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    table = rows(3, temperature=[1.0, 1.0, 0.0])
    clean = sample(logits.clone(), table, VOCABULARY)
    logits[1, 17] = bad
    spoiled = sample(logits, table, VOCABULARY)
    assert spoiled.finite.tolist() == [True, False, True]
    assert spoiled.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_draws_follow_the_distribution():
    count = 40_000
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.from_numpy(np.log(probabilities)).float().repeat(count, 1)
    tokens = sample(logits, rows(count), 4).tokens
    observed = np.bincount(tokens, minlength=4) / count
    assert abs(observed - probabilities).max() < 0.01


def test_min_p_comes_before_top_p():
    """After min_p only the first two are left (0.5 and 0.3), and 0.6 of their sum lies within the first alone, unlike of the whole."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1]])).repeat(500, 1)
    tokens = sample(logits, rows(500, min_p=0.5, top_p=0.6), 4).tokens
    assert set(tokens.tolist()) == {0}


def test_top_k_comes_before_top_p():
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]])).repeat(500, 1)
    assert set(sample(logits, rows(500, top_k=1, top_p=0.99), 5).tokens.tolist()) == {0}
    assert set(sample(logits, rows(500, top_k=2, top_p=1.0), 5).tokens.tolist()) == {0, 1, 2}, "ties with the k-th stay"


def test_a_wide_nucleus_needs_more_than_the_first_candidates_and_keeps_them():
    logits = torch.zeros(2000, VOCABULARY)
    logits[:, VOCABULARY // 2 :] = -0.001  # all ids are about equally likely; top_p 0.9 reaches far beyond the 256 best
    tokens = sample(logits, rows(2000, top_p=0.9), VOCABULARY).tokens
    assert np.unique(tokens).size > 400


def test_distinct_seeds_give_distinct_outputs():
    logits = torch.zeros(64, 50_000)
    assert np.unique(sample(logits, rows(64), 50_000).tokens).size > 55


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}])
def test_a_row_whose_every_id_is_banned_yields_nothing_and_others_do(options: dict[str, object]):
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[1:].clone(), rows(1, seeds=[1], **options), VOCABULARY).tokens[0]
    sampled = sample(logits, rows(2, banned=[(0, token) for token in range(VOCABULARY)], **options), VOCABULARY)
    assert sampled.finite.all()
    assert sampled.dead.tolist() == [True, False]
    assert sampled.tokens[1] == alone
