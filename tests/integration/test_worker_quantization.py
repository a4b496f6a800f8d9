"""The real model in integers: what the rounding of weights and activations together costs, on the kernels that serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import perplexity
from services.worker.engine import Engine
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
