"""The worker's logits processors against transformers' own, and against plain formulas where transformers has none.

Each example is a batch whose rows have parameters of their own. The rows go through the slots, as in a worker; what is expected is computed
row by row, in the documented order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from libs.sampling import SamplingParams
from services.worker.sampling.draws import uniforms
from services.worker.sampling.mask import mask_words
from services.worker.sampling.processing import process
from services.worker.sampling.rows import SamplingRows
from services.worker.sampling.sampler import sample
from services.worker.slots import SlotTable
from services.worker.step_inputs import build_sampling
from tests.unit.worker import helpers
from tests.unit.worker.helpers import batch, opening, row

VOCABULARY = 67  # no multiple of 32, and fewer than the logits' width
WIDTH = 70
EOS = (1, 2)
# Stands before outputs that transformers is shown: it takes no notice of a bad word as long as the whole text.
BEFORE = VOCABULARY - 1
LIMITS = replace(helpers.LIMITS, vocab_size=WIDTH)

# Few ids, so that they meet each other in prompts, outputs, words and biases.
ids = st.integers(0, 12)
texts = st.lists(ids, max_size=12)
scales = st.sampled_from([0.0, 0.5, -1.25, 2.0])


@dataclass(frozen=True)
class Request:
    """One row: what it asks for, its ids, and what its grammar allows (None: it has none)."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    grammar: frozenset[int] | None = None


@st.composite
def requests(draw: st.DrawFn) -> Request:
    params = SamplingParams(
        max_tokens=64,
        min_tokens=draw(st.integers(0, 14)),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, VOCABULARY])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.3, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=tuple(draw(st.sets(ids, max_size=2))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.75, 3.0])),
        presence_penalty=draw(scales),
        frequency_penalty=draw(scales),
        logit_bias=tuple(draw(st.dictionaries(ids, st.sampled_from([-100.0, -2.5, 1.0, 100.0]), max_size=4)).items()),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3)))),
        allowed_token_ids=tuple(draw(st.sampled_from([(), (), tuple(range(40)), (3, 5, 30, 66)]))),
    )
    grammar = draw(st.none() | st.frozensets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
    return Request(params, draw(st.lists(ids, min_size=1, max_size=12)), draw(texts), grammar)


batches = st.lists(requests(), min_size=1, max_size=5)


def together(asked: list[Request]) -> SamplingRows:
    """The rows of a step in which all requests are opened and sampled."""
    slots = SlotTable(LIMITS, EOS)
    opens = [opening(index, item.prompt, output=item.output, sampling=item.params) for index, item in enumerate(asked)]
    lengths = [len(item.prompt) + len(item.output) for item in asked]
    rows = [row(index, length, blocks=[index * 2, index * 2 + 1]) for index, length in enumerate(lengths)]
    return build_sampling(slots.stage(batch(*rows, opens=opens)).rows, VOCABULARY)


def lived(asked: Request, opened_with: int) -> SamplingRows:
    """The same for one request that was opened with so many tokens of its output and sampled the others; each step failed once before."""
    slots = SlotTable(LIMITS, EOS)
    opens = [opening(0, asked.prompt, output=asked.output[:opened_with], sampling=asked.params)]
    step = batch(row(0, len(asked.prompt) + opened_with, blocks=[0, 1]), opens=opens)
    for token in asked.output[opened_with:]:
        build_sampling(slots.stage(step).rows, VOCABULARY)
        slots.commit(slots.stage(step), {0: token})
        step = batch(row(0))
    return build_sampling(slots.stage(step).rows, VOCABULARY)


def grammars(asked: list[Request]) -> torch.Tensor | None:
    """The mask of a batch."""
    if all(item.grammar is None for item in asked):
        return None
    bits = np.zeros((len(asked), mask_words(VOCABULARY) * 32), np.uint8)
    for index, item in enumerate(asked):
        bits[index, list(range(bits.shape[1]) if item.grammar is None else item.grammar)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def some_logits(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def processed(asked: list[Request], logits: torch.Tensor) -> torch.Tensor:
    return process(logits.clone(), together(asked), grammars(asked), np.ones(len(asked), np.bool_)).logits


def wanted(asked: Request, logits: torch.Tensor) -> torch.Tensor:
    """One row by transformers' processors in the documented order, the grammar last of all."""
    params = asked.params
    both, output = torch.tensor([asked.prompt + asked.output]), torch.tensor([[BEFORE] * 3 + asked.output])
    scores = logits[None].clone()
    if params.allowed_token_ids:
        scores = SuppressTokensLogitsProcessor(sorted(set(range(VOCABULARY)) - set(params.allowed_token_ids)))(both, scores)
    unbanned = scores
    if params.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(output, scores)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[token], value] for token, value in params.logit_bias])(output, scores)
    endings = sorted({*EOS, *params.stop_token_ids})
    scores = MinNewTokensLengthLogitsProcessor(len(asked.prompt), params.min_tokens, endings)(both, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(both, scores)
    counts = torch.bincount(torch.tensor(asked.output, dtype=torch.long), minlength=VOCABULARY)
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if asked.grammar is not None:
        forbidden = sorted(set(range(VOCABULARY)) - asked.grammar)
        masked = SuppressTokensLogitsProcessor(forbidden)(both, scores)
        banned = bool(params.bad_words) or len(asked.output) < params.min_tokens
        # Where bans left nothing of what the grammar allows, the grammar counts alone.
        scores = SuppressTokensLogitsProcessor(forbidden)(both, unbanned) if banned and bool(masked.isinf().all()) else masked
    return scores[0]


def drawn_by_transformers(asked: Request, scores: torch.Tensor) -> int:
    """The id that the row's number falls on in the distribution that transformers' warpers leave, in the documented order."""
    params = asked.params
    if params.temperature == 0:
        return int(scores.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    weights = warpers(torch.zeros(1, 1, dtype=torch.long), scores[None].double()).softmax(-1)[0].numpy()
    as_words = [np.array([value], np.uint64) for value in (params.seed, 0, len(asked.output))]
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniforms(*as_words)[0] * cumulative[-1], side="right"))


@settings(deadline=None, max_examples=120)
@given(asked=batches, seed=st.integers(0, 10_000))
def test_a_mixed_batch_is_processed_as_transformers_processes_each_row(asked: list[Request], seed: int):
    logits = some_logits(len(asked), seed)
    expected = torch.stack([wanted(item, given) for item, given in zip(asked, logits, strict=True)])
    torch.testing.assert_close(processed(asked, logits), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.composes("penalties", "token bias", "structured output", "greedy", "seed")
@settings(deadline=None, max_examples=120)
@given(asked=batches, seed=st.integers(0, 10_000))
def test_what_is_drawn_is_what_transformers_distribution_gives_the_same_number(asked: list[Request], seed: int):
    logits = some_logits(len(asked), seed)
    scores = processed(asked, logits)
    sampled = sample(logits, together(asked), VOCABULARY, grammars(asked))
    dead = torch.isinf(scores).all(dim=1).tolist()
    assert sampled.dead.tolist() == dead
    assert sampled.finite.all()
    for index, item in enumerate(asked):
        if not dead[index]:
            assert sampled.tokens[index] == drawn_by_transformers(item, scores[index])


@settings(deadline=None, max_examples=60)
@given(asked=batches, seed=st.integers(0, 10_000))
def test_neighbours_change_no_bit_of_a_row(asked: list[Request], seed: int):
    logits = some_logits(len(asked), seed)
    beside, tokens = processed(asked, logits), sample(logits.clone(), together(asked), VOCABULARY, grammars(asked)).tokens
    for index, item in enumerate(asked):
        assert torch.equal(processed([item], logits[index : index + 1])[0], beside[index])
        assert sample(logits[index : index + 1].clone(), together([item]), VOCABULARY, grammars([item])).tokens[0] == tokens[index]


@settings(deadline=None, max_examples=60)
@given(asked=requests(), seed=st.integers(0, 10_000), data=st.data())
def test_a_slot_that_lived_through_its_output_asks_for_what_one_opened_with_it_does(asked: Request, seed: int, data: st.DataObject):
    logits = some_logits(1, seed)
    finite = np.ones(1, np.bool_)
    opened = process(logits.clone(), together([asked]), None, finite).logits
    for opened_with in {0, data.draw(st.integers(0, len(asked.output)))}:
        assert torch.equal(process(logits.clone(), lived(asked, opened_with), None, finite).logits, opened)
