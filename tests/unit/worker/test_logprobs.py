"""Log-probabilities on the worker: against torch's log_softmax and sort, and against transformers, whole and in chunks, alone and mixed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from libs.errors import ErrorCode, TokenloomError
from services.worker.engine import Engine
from services.worker.logprobs import Kept, of_tokens, top
from services.worker.ops.base import MOST_AGAIN
from services.worker.slots import SlotTable
from tests.support.tiny_llama import make_tiny_llama
from tests.support.worker_logprobs import Bench, check_told, distributions
from tests.unit.worker.helpers import GREEDY, LIMITS, batch, load_engine, opening


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("logprobs"), seed=3)


@pytest.fixture(scope="module", params=["cpu", "reference"])
def engine(model_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return load_engine(model_dir, kernels=request.param)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir, config=HfConfig.from_json_file(model_dir / "config.json")).eval()


logits = st.lists(st.sampled_from([-1.5, -0.5, 0.0, 0.25, 2.0, 7.0]), min_size=4, max_size=30)


@given(rows=st.lists(logits, min_size=1, max_size=3), wanted=st.integers(1, 4))
def test_the_best_come_in_falling_order_and_equals_by_the_lowest_id(rows: list[list[float]], wanted: int):
    width = min(map(len, rows))
    values = torch.tensor([item[:width] for item in rows])
    best, ids = top(values, wanted)
    for index, item in enumerate(rows):
        order = sorted(range(width), key=lambda other: (-item[other], other))[:wanted]
        assert ids[index].tolist() == order
        assert best[index].tolist() == [item[other] for other in order]


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(logits, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_a_token_has_its_log_softmax_and_one_more_than_those_above_it_as_rank(rows: list[tuple[list[float], int, int]]):
    width = min(len(item) for item, _, _ in rows)
    values = torch.tensor([item[:width] for item, _, _ in rows])
    kept = Kept(values, np.arange(len(rows)) * 2, tuple(wanted for _, _, wanted in rows))
    drawn = np.repeat([token for _, token, _ in rows], 2)
    expected = values.double().log_softmax(dim=1)
    for place, packed in of_tokens(kept, drawn):
        _, token, wanted = rows[place // 2]
        entry, own = packed.unpack()[0], values[place // 2]
        assert (entry.token_id, entry.rank) == (token, 1 + int((own > own[token]).sum()))
        assert entry.logprob == pytest.approx(float(expected[place // 2, token]), abs=1e-5)
        assert list(entry.top_ids) == sorted(range(width), key=lambda other: (-float(own[other]), other))[:wanted]


def test_a_row_with_a_certain_token_says_zero():
    kept = Kept(torch.tensor([[0.0, 1e4, -1e4]]), np.array([0]), (2,))
    entry = next(of_tokens(kept, np.array([1])))[1].unpack()[0]
    assert (entry.logprob, entry.rank, list(entry.top_ids)) == (0.0, 1, [1, 0])


def test_the_tokens_of_mixed_rows_are_told_as_transformers_tells_them(engine: Engine, theirs: LlamaForCausalLM):
    """Rows that ask for none, for the chosen token and for several; one is steered away from what the raw distribution prefers."""
    bench, vocabulary = Bench(engine), engine.facts.vocab_size
    asks: list[dict] = [{"logprobs": 5}, {}, {"logprobs": 0, "temperature": 1.0, "seed": 5}, {"logprobs": 2, "min_tokens": 64, "top_k": 3}]
    prompts = [[10 + slot, 40, 50 + slot, 60][: 1 + slot] for slot in range(4)]
    executed = bench.step(
        *((slot, len(prompt), True) for slot, prompt in enumerate(prompts)),
        opens=[(slot, prompt, ask) for slot, (prompt, ask) in enumerate(zip(prompts, asks, strict=True))],
    )
    for _ in range(6):
        assert set(executed.logprobs) == {0, 2, 3}
        assert not executed.told
        for slot, packed in executed.logprobs.items():
            prompts[slot].append(executed.tokens[slot])
            expected = distributions(theirs, prompts[slot][:-1], vocabulary)[-1:]
            check_told(packed.unpack(), prompts[slot][-1:], expected, asks[slot]["logprobs"])
        executed = bench.step(*((slot, 1, True) for slot in range(4)))


@pytest.mark.parametrize("chunk", [1, 16, 33, 200])
def test_a_prompt_is_told_as_transformers_tells_it_however_it_is_cut(engine: Engine, theirs: LlamaForCausalLM, chunk: int):
    prompt = [int(token) for token in np.random.default_rng(chunk).integers(3, 250, 40 if chunk == 1 else 120)]
    bench = Bench(engine)
    opens: list[tuple[int, Sequence[int], dict]] = [(0, prompt, {"prompt_logprobs": 3}), (1, [5, 6, 7], {"logprobs": 1})]
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        last = start + count == len(prompt)
        executed = bench.step((1, 1 if start else 3, True), (0, count, last), opens=[] if start else opens)
        assert set(executed.logprobs) == {0}
        assert len(bench.told[0]) == min(start + count + 1, len(prompt))
    entries = bench.told[0].unpack()
    assert np.isnan([entries[0].logprob, *entries[0].top_logprobs]).all()
    assert (entries[0].token_id, entries[0].rank) == (prompt[0], 0)
    check_told(entries[1:], prompt[1:], distributions(theirs, prompt, engine.facts.vocab_size)[:-1], 3)
    assert not bench.step((0, 1, True)).told


def test_chunks_tell_the_same_bits_as_the_whole_prompt(model_dir: Path):
    """More positions than are looked at in one piece, too. (MKL's products of so small a model promise no equal bits.)"""
    engine = load_engine(model_dir, kernels="cpu")
    prompt = [int(token) for token in np.random.default_rng(9).integers(3, 250, MOST_AGAIN + 60)]
    told = []
    for cuts in ((0, len(prompt)), (0, 7, 8, 100, 101, len(prompt))):
        bench = Bench(engine, blocks=16)
        for start, end in itertools.pairwise(cuts):
            opens = [] if start else [(0, prompt, {"prompt_logprobs": 2})]
            bench.step((0, end - start, end == len(prompt)), opens=opens)
        told.append(bench.told[0])
    assert told[0] == told[1]
    assert len(told[0]) == len(prompt)


def test_a_prompt_of_one_token_has_an_undefined_position_alone(engine: Engine):
    bench = Bench(engine)
    bench.step((0, 1, True), opens=[(0, [7], {"prompt_logprobs": 1})])
    entries = bench.told[0].unpack()
    assert [(entry.token_id, entry.rank, list(entry.top_ids)) for entry in entries] == [(7, 0, [0])]


def test_who_asks_for_them_draws_the_same_tokens(engine: Engine):
    drawn = []
    for ask in ({}, {"logprobs": 4, "prompt_logprobs": 4}):
        bench = Bench(engine)
        opens = [(0, [9, 8, 7], ask | {"temperature": 0.8, "seed": 11, "min_tokens": 5})]
        executed = [bench.step((0, 3, True), opens=opens), *(bench.step((0, 1, True)) for _ in range(8))]
        drawn.append([step.tokens[0] for step in executed])
    assert drawn[0] == drawn[1]


def test_more_alternatives_than_the_worker_lists_break_its_rules():
    table = SlotTable(replace(LIMITS, max_logprobs=3), ())
    table.stage(batch(opens=[opening(0, [1], sampling=replace(GREEDY, logprobs=3, prompt_logprobs=3))]))
    for ask in ({"logprobs": 4}, {"prompt_logprobs": 4}):
        with pytest.raises(TokenloomError, match="more log-probabilities than the 3") as caught:
            table.stage(batch(opens=[opening(0, [1], sampling=replace(GREEDY, **ask))]))
        assert caught.value.code is ErrorCode.PROTOCOL_VIOLATION


def test_how_many_are_listed_is_the_operators_choice_and_the_vocabulary_at_most(model_dir: Path):
    vocabulary = load_engine(model_dir).facts.vocab_size
    config = json.loads((model_dir / "config.json").read_text())
    assert vocabulary < config["vocab_size"]
    listed = [load_engine(model_dir, max_logprobs=asked).facts.max_logprobs for asked in (0, 20, -1, 100_000)]
    assert listed == [0, 20, vocabulary, vocabulary]
