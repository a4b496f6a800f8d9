"""The real model in integers: what the rounding of weights and activations together costs, on the kernels that serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench import perplexity
from services.worker import quantized_reader
from services.worker.engine import Engine
from services.worker.quantizing import grouped
from services.worker.weights import GgufSource
from tests.unit.worker.helpers import Driver, load_engine

pytestmark = pytest.mark.model

TOKENS = 1024
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def engine_of(model_dir: Path, form: str | None) -> Engine:
    return load_engine(model_dir, kernels="cpu", quantization=form, kv_cache_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def floats(model_dir: Path) -> perplexity.Scores:
    tokens = perplexity.read(model_dir, perplexity.SAMPLE)[:TOKENS]
    return perplexity.score(engine_of(model_dir, None), tokens, 512, 256)


@pytest.mark.parametrize(("form", "most"), [("int8", 1.01), ("int4", 1.05)])
def test_perplexity_is_near_that_of_floats_and_the_capital_is_still_paris(
    model_dir: Path, floats: perplexity.Scores, form: str, most: float
):
    engine = engine_of(model_dir, form)
    tokens = perplexity.read(model_dir, perplexity.SAMPLE)[:TOKENS]
    scores = perplexity.score(engine, tokens, 512, 256)
    assert scores.logprobs != floats.logprobs
    assert scores.perplexity < most * floats.perplexity
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    assert "Paris" in tokenizer.decode(Driver(engine).generate({0: prompt}, 8)[0])


def test_four_bits_made_of_floats_cost_what_the_documents_say(model_dir: Path, floats: perplexity.Scores, monkeypatch: pytest.MonkeyPatch):
    """The file's weights are of 4 bits themselves: groups shifted by half of one are not its own, and stand in for those of any floats."""

    def shifted(weight: torch.Tensor) -> torch.Tensor:
        return torch.roll(grouped(torch.roll(weight, 16, dims=1)).dequantized(), -16, dims=1)

    monkeypatch.setattr(quantized_reader, "grouped", shifted)
    monkeypatch.setattr(GgufSource, "has_groups", lambda self, name: False)
    tokens = perplexity.read(model_dir, perplexity.SAMPLE)[:TOKENS]
    ratio = perplexity.score(engine_of(model_dir, "int4"), tokens, 512, 256).perplexity / floats.perplexity
    assert 1.05 < ratio < 1.19
