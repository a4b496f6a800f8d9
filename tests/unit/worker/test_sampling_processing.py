"""Logits processors through `sample`: each by its plain meaning, their order, and dead ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.sampling import SamplingParams
from services.worker.sampling.rows import NO_EDITS, SamplingRows
from services.worker.sampling.sampler import Sampled, sample
from services.worker.step_inputs import build_sampling
from tests.unit.worker.helpers import GREEDY, Driver, batch, load_engine, opening, row
from tests.unit.worker.test_sampling_mask import grammar
from tests.unit.worker.test_slots import table

VOCABULARY = 90
BEST = torch.linspace(4.0, -4.0, VOCABULARY)


def wanted(*requests: tuple[SamplingParams, list[int], list[int]]) -> SamplingRows:
    """What the worker makes of requests (parameters, prompt, output) in one step."""
    slots = table()
    opens = [opening(index, prompt, output=output, sampling=params) for index, (params, prompt, output) in enumerate(requests)]
    lengths = [len(prompt) + len(output) for _, prompt, output in requests]
    steps = [row(index, length, blocks=[index * 4 + n for n in range(4)]) for index, length in enumerate(lengths)]
    return build_sampling(slots.stage(batch(*steps, opens=opens)).rows, VOCABULARY)


def drawn(*requests: tuple[SamplingParams, list[int], list[int]], mask: torch.Tensor | None = None) -> Sampled:
    """The same logits for each: id 0 is the best, id 1 the next."""
    return sample(BEST.repeat(len(requests), 1), wanted(*requests), VOCABULARY, mask)


def greedy(**parameters: object) -> SamplingParams:
    return replace(GREEDY, **parameters)


def test_a_bias_moves_its_id_and_no_other_row():
    up, down = greedy(logit_bias=((50, 100.0),)), greedy(logit_bias=((0, -100.0),))
    assert drawn((GREEDY, [5], []), (up, [5], []), (down, [5], [])).tokens.tolist() == [0, 50, 1]


def test_only_allowed_ids_are_sampled():
    assert drawn((greedy(allowed_token_ids=(70, 33, 80)), [5], []), (GREEDY, [5], [])).tokens.tolist() == [33, 0]


def test_allowed_ids_that_do_not_exist_are_a_dead_end_of_their_row():
    sampled = drawn((greedy(allowed_token_ids=(VOCABULARY, 99)), [5], []), (GREEDY, [5], []))
    assert sampled.dead.tolist() == [True, False]
    assert sampled.finite.all()
    assert sampled.tokens[1] == 0


def test_a_bad_word_is_banned_where_the_output_ends_with_what_comes_before_its_last_id():
    words = greedy(bad_words=((0,), (8, 9, 1), (9, 2), (3, 1)))
    tokens = drawn((words, [5], []), (words, [5], [8, 9]), (words, [8, 9], []), (words, [8], [9]), (words, [5], [8, 9, 4])).tokens
    assert tokens.tolist() == [1, 3, 1, 1, 1], "the prompt is no part of the output"


def test_repetition_counts_prompt_and_output_and_the_others_the_output_only():
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 1], logits[:, 2], logits[:, 3] = 2.0, 1.9, -3.0
    repeated, frequent, present = greedy(repetition_penalty=2.0), greedy(frequency_penalty=0.5), greedy(presence_penalty=2.0)
    table_of = wanted((repeated, [1, 3], [2]), (frequent, [2], [1, 1, 7]), (present, [2], [1, 1, 1]), (GREEDY, [1], [1]))
    sample(logits, table_of, VOCABULARY)
    assert logits[0, [1, 2, 3]].tolist() == [1.0, pytest.approx(0.95), -6.0]
    assert logits[1, [1, 2, 7]].tolist() == [1.0, pytest.approx(1.9), -0.5]
    assert logits[2, [1, 2]].tolist() == [0.0, pytest.approx(1.9)]
    assert logits[3, [1, 2, 3]].tolist() == [2.0, pytest.approx(1.9), -3.0]


def test_a_repetition_penalty_beyond_float32_forbids_nothing():
    tiny, huge = greedy(repetition_penalty=1e-38, allowed_token_ids=(0,)), greedy(repetition_penalty=3e38, allowed_token_ids=(80,))
    sampled = drawn((tiny, [0], []), (huge, [80], []))
    assert sampled.tokens.tolist() == [0, 80]
    assert not sampled.dead.any()


def test_penalties_come_after_the_bias():
    """(1 + 3) / 2 = 2 is below the rival's 3; penalised first it would be 1 / 2 + 3, above it."""
    logits = torch.full((1, VOCABULARY), -9.0)
    logits[0, 7], logits[0, 8] = 1.0, 3.0
    biased = greedy(repetition_penalty=2.0, logit_bias=((7, 3.0),))
    assert sample(logits, wanted((biased, [7], [])), VOCABULARY).tokens.tolist() == [8]


def test_a_bias_does_not_bring_back_what_is_forbidden():
    bias = ((7, 100.0),)
    tokens = drawn(
        (greedy(bad_words=((7,),), logit_bias=bias), [5], []),
        (greedy(allowed_token_ids=(40, 41), logit_bias=bias), [5], []),
        (greedy(min_tokens=2, stop_token_ids=(7,), logit_bias=bias), [5], []),
    ).tokens
    assert tokens.tolist() == [0, 40, 0]


def test_bans_and_penalties_work_beside_a_grammar_and_yield_to_it_where_nothing_is_left():
    worded = greedy(bad_words=((3,), (4,)))
    sampled = drawn((worded, [5], []), (worded, [5], []), mask=grammar({3, 9}, {3, 4}, vocabulary=VOCABULARY))
    assert sampled.tokens.tolist() == [9, 3]
    assert not sampled.dead.any()


def test_min_tokens_yields_to_a_grammar_that_allows_only_the_end():
    short = greedy(min_tokens=5)
    sampled = drawn((short, [5], []), (short, [5], []), mask=grammar({2}, {2, 60}, vocabulary=VOCABULARY))
    assert sampled.tokens.tolist() == [2, 60]


def test_a_grammar_and_allowed_ids_without_a_common_id_are_a_dead_end():
    narrow = greedy(allowed_token_ids=(3, 4))
    sampled = drawn((narrow, [5], []), (narrow, [5], []), mask=grammar({4, 9}, {9}, vocabulary=VOCABULARY))
    assert sampled.dead.tolist() == [False, True]
    assert sampled.tokens[0] == 4


def test_rows_of_a_16_bit_model_are_processed_in_float32():
    table_of = wanted((greedy(logit_bias=((1, 0.01),)), [5], []))
    logits = torch.full((1, VOCABULARY), 3.0, dtype=torch.bfloat16)
    assert sample(logits, table_of, VOCABULARY).tokens.tolist() == [1], "3.01 is 3 in bfloat16"


def test_ids_without_a_logit_change_nothing():
    beyond = greedy(logit_bias=((95, 5.0), (40, 50.0)), bad_words=((95,), (96, 97)), repetition_penalty=1.5)
    assert drawn((beyond, [95, 96], [97])).tokens.tolist() == [40]


def test_rows_that_ask_for_nothing_build_no_edits():
    table_of = wanted((GREEDY, [5], [6]), (greedy(temperature=1.0, top_k=5), [5], []))
    assert table_of.edits is NO_EDITS
    assert table_of.banned_rows.size == 0
    before = BEST.repeat(2, 1)
    sample(before, table_of, VOCABULARY)
    assert np.array_equal(before.numpy(), BEST.repeat(2, 1).numpy())


@pytest.mark.composes("penalties", "token bias", "seed", "chunked prefill")
def test_a_request_goes_on_elsewhere_with_the_tokens_it_would_have_had(tiny_llama_dir: Path):
    engine = load_engine(tiny_llama_dir)
    params = SamplingParams(
        max_tokens=64,
        min_tokens=20,
        temperature=1.0,
        seed=9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=1.5,
        logit_bias=((30, 6.0), (40, 5.0)),
        bad_words=((30, 40), (50,), (30, 30)),
    )
    prompt, neighbour = [*range(5, 25)], [*range(60, 90)]
    lived = Driver(engine).generate({0: prompt, 1: neighbour}, 24, sampling=params)[0]
    plain = Driver(engine).generate({0: prompt}, 24, sampling=SamplingParams(max_tokens=64, temperature=1.0, seed=9))[0]
    assert lived != plain
    moved = Driver(engine, seed=1)
    moved.step([(0, 23, False)], [opening(0, prompt, output=lived[:10], sampling=params)])
    rest = [moved.step([(0, len(prompt) + 10 - 23, True)])[0]]
    while len(rest) < 14:
        rest.append(moved.step([(0, 1, True)])[0])
    assert rest == lived[10:]
