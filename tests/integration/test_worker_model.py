"""Greedy tokens of the real model against transformers in float32, built from the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from libs.logprobs import TokenLogprobs
from libs.models.directory import ModelDirectory
from services.worker import weights
from services.worker.engine import Engine
from services.worker.ops.base import StepInputs
from tests.support.worker_logprobs import Bench, check_told, distributions
from tests.unit.worker.helpers import Driver, batch, load_engine, opening

pytestmark = pytest.mark.model

STEPS = 24
# Where the two best logits of the reference lie closer than this, either may come first: then both go on from the reference's token.
CLOSE = 5e-4
TEXTS = [
    "Hi",
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233,",
    "Die Donaudampfschifffahrt war im 19. Jahrhundert",
    "東京は日本の首都で、",
    "The weather today is 🌤️ and tomorrow 🌧️, so",
    "Once upon a time there was a loom. " * 40,
]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return load_engine(model_dir, kv_cache_memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LlamaForCausalLM:
    """transformers' model with the very weights that the worker reads (its own GGUF reader takes 18 s)."""
    directory = ModelDirectory(model_dir)
    theirs = LlamaForCausalLM(HfConfig.from_json_file(model_dir / "config.json")).eval()
    source = weights.open_source(directory.weight_files(), directory.config)
    state = {name: source.tensor(name) for name in theirs.state_dict() if name != "lm_head.weight"}
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    return theirs


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


@torch.inference_mode()
def check(reference: LlamaForCausalLM, prompt: list[int], outputs: list[int]) -> int:
    """Asserts that `outputs` are the reference's greedy tokens, teacher-forced; returns how many were too close to call."""
    logits = reference(torch.tensor([prompt + outputs[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    close = 0
    for position, token in enumerate(outputs):
        if int(logits[position].argmax()) != token:
            assert float(best[position, 0] - logits[position, token]) < CLOSE, f"position {position}: {token}"
            close += 1
    return close


@pytest.mark.composes("greedy")
def test_prompts_together_give_the_references_tokens(engine: Engine, reference: LlamaForCausalLM, prompts: list[list[int]]):
    outputs = Driver(engine, seed=1).generate(dict(enumerate(prompts)), STEPS)
    close = [check(reference, prompt, outputs[index]) for index, prompt in enumerate(prompts)]
    print(f"{sum(close)} of {len(prompts) * STEPS} tokens were within {CLOSE} of the reference's best")


@pytest.mark.composes("greedy", "chunked prefill")
def test_alone_and_in_chunks_the_tokens_are_the_same(engine: Engine, prompts: list[list[int]]):
    together = Driver(engine, seed=2).generate(dict(enumerate(prompts)), STEPS)
    chunked = Driver(engine, seed=3).generate(dict(enumerate(prompts)), STEPS, chunk=48)
    assert chunked == together
    for index in (0, 4, 8):
        assert Driver(engine, seed=4).generate({0: prompts[index]}, STEPS)[0] == together[index]


@pytest.mark.composes("greedy", "prefix caching")
def test_a_prefix_in_the_cache_changes_nothing(engine: Engine, prompts: list[list[int]]):
    """The second sequence starts in the first one's full blocks and computes only its tail."""
    prompt = prompts[8][:100]
    driver = Driver(engine, seed=5)
    first = driver.step([(0, 100, True)], [opening(0, prompt)])[0]
    owner = driver.slots[0]
    assert owner is not None
    shared = owner.blocks[:6].tolist()
    driver._held[1] = 6
    staged = opening(1, prompt, blocks=shared, computed=96)
    driver.slots.commit(driver.slots.stage(batch(opens=[staged])), {})
    assert driver.step([(1, 4, True)])[1] == first


@pytest.mark.composes("logprobs", "greedy", "seed", "chunked prefill")
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_log_probabilities_are_the_references(
    engine: Engine, reference: LlamaForCausalLM, prompts: list[list[int]], model_dir: Path, kernels: str
):
    """Six sequences in one batch, prompts in chunks of 48 beside tokens that are drawn: each asks for something else."""
    ours = engine if kernels == "cpu" else load_engine(model_dir, kernels="reference", kv_cache_memory_bytes=128 << 20)
    asks: list[dict[str, Any]] = [
        {"logprobs": 5},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"logprobs": 20, "temperature": 1.0, "seed": 7},
        {"logprobs": 1, "prompt_logprobs": 0},
        {"temperature": 1.0, "seed": 8},
        {"logprobs": 3, "prompt_logprobs": 5},
    ]
    known = [list(prompts[index]) for index in (1, 2, 3, 4, 5, 8)]
    lengths, told = [len(tokens) for tokens in known], dict[int, list[TokenLogprobs]]({slot: [] for slot in range(6)})
    bench = Bench(ours, blocks=-(-(max(lengths) + 12) // 16))
    opens, done = [(slot, list(known[slot]), ask) for slot, ask in enumerate(asks)], [0] * 6
    for _ in range(10):
        rows = [(slot, min(48, len(known[slot]) - done[slot])) for slot in range(6)]
        sampled = [done[slot] + count == len(known[slot]) for slot, count in rows]
        executed = bench.step(*((slot, count, last) for (slot, count), last in zip(rows, sampled, strict=True)), opens=opens)
        opens = []
        for slot, count in rows:
            done[slot] += count
            if slot in executed.tokens:
                known[slot].append(executed.tokens[slot])
                told[slot] += executed.logprobs[slot].unpack() if slot in executed.logprobs else []
    for slot, ask in enumerate(asks):
        expected, length = distributions(reference, known[slot], ours.facts.vocab_size), lengths[slot]
        assert len(known[slot]) - length >= 3
        if "logprobs" in ask:
            check_told(told[slot], known[slot][length:], expected[length - 1 : -1], ask["logprobs"])
        if "prompt_logprobs" in ask:
            check_told(bench.told[slot].unpack()[1:], known[slot][1:length], expected[: length - 1], ask["prompt_logprobs"])


def test_greedy_text_is_sensible(engine: Engine, model_dir: Path, prompts: list[list[int]]):
    outputs = Driver(engine).generate({0: prompts[2]}, 8)[0]
    assert "Paris" in Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(np.asarray(outputs).tolist())


@torch.inference_mode()
def test_rounding_stays_small_where_activations_are_large(engine: Engine, reference: LlamaForCausalLM, model_dir: Path):
    """Text of bytes that the model hardly knows. With sums in one accumulator each (decision 29) the largest difference is 2e-3."""
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("\x00\x01\ufffd ⅷ﷽ 𝕳", add_special_tokens=False).ids
    exact = copy.deepcopy(reference).double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    at, blocks = torch.arange(len(ids)), -(-len(ids) // 16)
    starts, lengths = torch.tensor([0, len(ids)], dtype=torch.int32), torch.tensor([len(ids)], dtype=torch.int32)
    inputs = StepInputs(torch.tensor(ids), at, at, starts, lengths, torch.arange(blocks, dtype=torch.int32)[None], at)
    ours = engine.step(inputs).double().log_softmax(-1)
    assert float((ours - exact).abs().max()) < 1e-3
