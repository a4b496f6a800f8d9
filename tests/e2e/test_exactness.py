"""Greedy tokens are transformers' greedy tokens: alone and all at once, chunked and not. A seed's tokens are its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.mesh import Mesh
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]
COUNT = 24


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids[:keep] for text, keep in PROMPTS]


async def generate(mesh: Mesh, prompt: list[int], count: int, **fields: Any) -> list[int]:
    body = {"model": mesh.model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, **fields}
    async with mesh.client() as client:
        response = await client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    ids = response.json()["choices"][0]["token_ids"]
    assert len(ids) == count
    return list(ids)


async def check(mesh: Mesh, reference: Reference, prompts: list[list[int]]) -> None:
    """All prompts at once; see Reference.check."""
    outputs = await asyncio.gather(*(generate(mesh, prompt, COUNT) for prompt in prompts))
    for prompt, ids in zip(prompts, outputs, strict=True):
        reference.check(prompt, ids)


def test_the_prompts_are_as_varied_as_they_should_be(prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) == 20
    assert min(lengths) == 1
    assert max(lengths) == 1500


async def test_greedy_tokens_are_those_of_transformers_alone(mesh: Mesh, reference: Reference, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        reference.check(prompt, await generate(mesh, prompt, COUNT))


async def test_greedy_tokens_are_what_generate_yields(mesh: Mesh, reference: Reference, prompts: list[list[int]]) -> None:
    clear = 0
    for prompt in prompts[1:5]:
        ids = await generate(mesh, prompt, COUNT)
        if not reference.disagreements(prompt, ids):
            assert ids == reference.greedy(prompt, COUNT)
            clear += 1
    assert clear >= 2, "near ties are rare"


@pytest.mark.composes("greedy", "chunked prefill")
async def test_greedy_tokens_are_those_of_transformers_all_at_once(mesh: Mesh, reference: Reference, prompts: list[list[int]]) -> None:
    await check(mesh, reference, prompts)


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-enable-chunked-prefill", "--no-enable-prefix-caching"],
        ["--max-num-batched-tokens=64", "--no-enable-prefix-caching"],
    ],
    ids=["without-chunks", "in-small-chunks"],
)
async def test_greedy_tokens_do_not_depend_on_chunking(
    flags: list[str], tmp_path: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    mesh = Mesh.start(tmp_path, *flags)
    try:
        await check(mesh, reference, prompts)
        steps = mesh.metrics("scheduler")
        if "--max-num-batched-tokens=64" in flags:
            assert steps["tokenloom:scheduler_mixed_steps_total"] > 0, "no step mixed prefill and decode"
    finally:
        assert mesh.stop() == 0


@pytest.mark.composes("greedy", "leases")
async def test_greedy_tokens_do_not_depend_on_leases(tmp_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    mesh = Mesh.start(tmp_path, "--max-lease-steps=8")
    try:
        await check(mesh, reference, prompts[:8])
        steps = mesh.metrics("scheduler")
        assert steps["tokenloom:leases_total"] > 0, "nobody was granted several steps"
    finally:
        assert mesh.stop() == 0


@pytest.mark.composes("seed")
async def test_a_seed_gives_the_same_tokens_alone_and_among_sixteen_others(mesh: Mesh, prompts: list[list[int]]) -> None:
    async def draw(seed: int, prompt: list[int]) -> list[int]:
        return await generate(mesh, prompt, COUNT, temperature=0.8, top_p=0.95, seed=seed)

    alone = await draw(1234, prompts[1])
    others = [draw(seed, prompts[seed % 12]) for seed in range(16)]
    crowd = await asyncio.gather(draw(1234, prompts[1]), *others)
    assert crowd[0] == alone


async def test_distinct_seeds_give_distinct_tokens(mesh: Mesh, prompts: list[list[int]]) -> None:
    drawn = await asyncio.gather(*(generate(mesh, prompts[1], COUNT, temperature=1.0, seed=seed) for seed in range(8)))
    assert len({tuple(ids) for ids in drawn}) == 8
