"""The model on the reference and on the CPU executor: against transformers, and against itself in other batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from services.worker.engine import Engine
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import Driver, load_engine, opening

VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Engine:
    return load_engine(tiny_llama_dir)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(tmp_path: Path, variant: str, kernels: str):
    path = make_tiny_llama(tmp_path / "model", seed=3, **VARIANTS[variant])
    theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    assert isinstance(theirs.config, HfConfig)
    engine, ids = load_engine(path, kernels=kernels), prompt(150)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    driver = Driver(engine)
    outputs = driver.generate({0: ids}, 12)[0]
    with torch.inference_mode():
        generated = theirs(torch.tensor([ids + outputs])).logits[0, len(ids) - 1 : -1, : engine.facts.vocab_size]
    for logits, token in zip(generated, outputs, strict=True):
        assert logits.max() - logits[token] < 1e-3
    assert expected.shape[-1] == engine.facts.logits_width


def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(engine: Engine):
    prompts = {0: prompt(1, 1), 1: prompt(40, 2), 2: prompt(17, 3), 3: prompt(200, 4)}
    together = Driver(engine, seed=1).generate(prompts, 20)
    for slot, ids in prompts.items():
        assert Driver(engine, seed=2).generate({slot: ids}, 20)[slot] == together[slot]


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_chunked_prefill_changes_nothing(engine: Engine, chunk: int):
    prompts = {0: prompt(70, 5), 1: prompt(31, 6)}
    assert Driver(engine).generate(prompts, 10, chunk=chunk) == Driver(engine).generate(prompts, 10)


def test_logits_are_bit_identical_whatever_else_is_in_the_step(engine: Engine):
    """The model's own output, not only its best token: this is what seeds and exact continuation stand on."""
    seen: list[torch.Tensor] = []
    step = engine.step

    def spy(*args: object) -> torch.Tensor:
        logits = step(*args)
        seen.append(logits.clone())
        return logits

    engine.step = spy
    try:
        Driver(engine, seed=3).step([(0, 30, True)], [opening(0, prompt(30, 7))])
        for others in (1, 2, 6, 11, 14):
            opens = [opening(slot, prompt(30 if not slot else 1 + slot, 7 + slot)) for slot in range(others + 1)]
            Driver(engine, seed=others).step([(item.slot, item.prompt_ids.size, True) for item in opens], opens)
            assert torch.equal(seen[-1][0], seen[0][0])
    finally:
        engine.step = step


def test_a_sequence_reopened_with_its_output_continues_as_if_never_left(engine: Engine):
    ids = prompt(25, 8)
    whole = Driver(engine).generate({0: ids}, 30)[0]
    driver = Driver(engine, seed=9)
    continued = driver.step([(5, 25 + 12, True)], [opening(5, ids, output=whole[:12])])[5]
    rest = [continued]
    while len(rest) < 18:
        rest.append(driver.step([(5, 1, True)])[5])
    assert rest == whole[12:]
