"""Prompts, bodies and arrivals: the same for the same seed, of the lengths asked for, and Poisson."""

import itertools
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.prompts import PromptShape, ordinary_ids, token_prompts, word_prompts
from bench.workload import CHAT, COMPLETIONS, NAMED, Workload, poisson_arrivals, request_body

SHAPES = st.builds(PromptShape, st.integers(1, 40), st.integers(0, 40))


@given(SHAPES, st.integers(1, 8), st.integers(0, 2**32))
def test_word_prompts_have_their_length_share_exactly_the_prefix_and_repeat_with_their_seed(shape, count, seed):
    prompts = word_prompts(shape, count, seed)
    assert prompts == word_prompts(shape, count, seed)
    words = [prompt.split(" ") for prompt in prompts]
    assert {len(prompt) for prompt in words} == {shape.prefix_len + shape.input_len}
    assert len({tuple(prompt[: shape.prefix_len]) for prompt in words}) == 1


@given(SHAPES, st.integers(1, 8), st.integers(0, 2**32))
def test_token_prompts_are_exactly_as_long_as_asked_and_of_the_vocabulary(shape, count, seed):
    prompts = token_prompts(shape, count, seed, [3, 5, 8])
    assert {len(prompt) for prompt in prompts} == {shape.prefix_len + shape.input_len}
    assert {token for prompt in prompts for token in prompt} <= {3, 5, 8}
    assert len({tuple(prompt[: shape.prefix_len]) for prompt in prompts}) == 1


def test_prompts_differ_from_each_other_and_between_seeds():
    shape = PromptShape(32)
    assert len({*word_prompts(shape, 20, seed=1), *word_prompts(shape, 20, seed=2)}) == 40


def test_ordinary_ids_leave_out_the_tokens_that_end_a_text(tiny_llama_dir):
    tokenizer = json.loads((tiny_llama_dir / "tokenizer.json").read_text())
    added = {token["id"] for token in tokenizer["added_tokens"]}
    found = ordinary_ids(tiny_llama_dir)
    assert added
    assert not added & set(found)
    assert set(found) | added == {*tokenizer["model"]["vocab"].values()} | added


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        ordinary_ids(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ordinary_ids(tmp_path)


def test_bodies_ask_for_a_greedy_stream_with_usage_and_name_ignore_eos_only_where_it_is_on():
    chat = json.loads(request_body(CHAT, "m", "hello", NAMED["a"]))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert (chat["max_tokens"], chat["temperature"], chat["stream"], chat["ignore_eos"]) == (128, 0, True, True)
    assert chat["stream_options"] == {"include_usage": True}
    plain = Workload(PromptShape(4), 8, 1, ignore_eos=False, rate=1.0)
    completions = json.loads(request_body(COMPLETIONS, "m", [1, 2], plain))
    assert completions["prompt"] == [1, 2]
    assert "ignore_eos" not in completions
    assert "messages" not in completions


def test_named_workloads_are_the_peers():
    lengths = {name: (w.concurrency, w.shape.prefix_len, w.shape.input_len, w.output_len) for name, w in NAMED.items()}
    assert lengths == {"a": (1, 0, 128, 128), "b": (8, 0, 128, 128), "c": (32, 0, 256, 64), "d": (8, 512, 32, 32)}
    assert all(w.ignore_eos and w.num_prompts >= w.concurrency for w in NAMED.values())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, "either a concurrency"),
        ({"concurrency": 1, "rate": 1.0}, "either a concurrency"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": float("nan")}, "rate must be above 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"concurrency": 1, "output_len": 0}, "output length"),
        ({"concurrency": 1, "num_prompts": 0}, "number of prompts"),
        ({"concurrency": 1, "shape": PromptShape(0)}, "input length"),
        ({"concurrency": 1, "shape": PromptShape(1, -1)}, "prefix length"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(change, complaint):
    fields = {"shape": PromptShape(1), "output_len": 1, "num_prompts": 1, "ignore_eos": False} | change
    with pytest.raises(ValueError, match=complaint):
        Workload(**fields)


@given(st.floats(0.1, 1000), st.integers(1, 50), st.integers(0, 2**32))
def test_arrivals_begin_at_zero_never_go_back_and_repeat_with_their_seed(rate, count, seed):
    arrivals = poisson_arrivals(rate, count, seed)
    assert list(arrivals) == sorted(arrivals)
    assert (arrivals[0], len(arrivals)) == (0.0, count)
    assert arrivals == poisson_arrivals(rate, count, seed)
    assert count < 3 or arrivals != poisson_arrivals(rate, count, seed + 1)


def test_the_gaps_between_arrivals_are_exponential():
    arrivals = poisson_arrivals(rate=4.0, count=20_001, seed=7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)  # as large as the mean: only an exponential's is, of the usual ones
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)
