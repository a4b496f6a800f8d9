"""Log-probabilities from the worker's blocks to the client's JSON: each with its token, once, whatever dies or is preempted on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway_core import MAX_MODEL_LEN, Stack, cached_of, expected, running_stack
from tests.support.gateway_process import events_of, until
from tests.support.logprobs import told
from tests.support.model_worker import VOCABULARY

# Three full blocks and a tail.
PROMPT = [1 + index % 37 for index in range(50)]
ASKED = {"logprobs": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}


@pytest.fixture
async def stack(tmp_path):
    async with running_stack(tmp_path) as running:
        yield running


def check(choice: dict[str, Any], prompt: list[int]) -> None:
    """That a choice shows what the model tells of every token of its prompt and output."""
    ids, shown = choice["token_ids"], choice["logprobs"]
    assert shown["tokens"] == [f"token_id:{token}" for token in ids]
    assert shown["token_logprobs"] == [told(len(prompt) + at, token).unpack()[0].logprob for at, token in enumerate(ids)]
    assert all(len(best) >= 2 for best in shown["top_logprobs"])
    assert len(choice["prompt_logprobs"]) == len(prompt)
    assert choice["prompt_logprobs"][0] is None
    for position, (token, entry) in enumerate(zip(prompt, choice["prompt_logprobs"], strict=True)):
        if position:
            known = told(position, token, 1).unpack()[0]
            assert (entry[str(token)]["logprob"], entry[str(token)]["rank"]) == (known.logprob, known.rank)
            assert entry[str((token + 1) % VOCABULARY)]["logprob"] == known.top_logprobs[0]


@pytest.mark.composes("logprobs", "chunked prefill", "prefix caching")
async def test_prompt_and_output_are_told_and_the_cache_is_not_read(tmp_path):
    async with running_stack(tmp_path, max_num_batched_tokens=17) as stack:
        for fields in ({}, ASKED, {"logprobs": 0}):
            body = await stack.complete(PROMPT, seed=3, **fields)
            assert cached_of(body) == (48 if fields == {"logprobs": 0} else 0)
            assert body["choices"][0]["token_ids"] == expected(PROMPT, seed=3)
            if fields is ASKED:
                check(body["choices"][0], PROMPT)
        assert stack.worker.violations == []


@pytest.mark.composes("logprobs", "n", "seed", "prompt list")
async def test_every_choice_shows_its_prompts(stack):
    body = await stack.complete([PROMPT, PROMPT[:7]], n=3, seed=4, **ASKED)
    for choice in body["choices"]:
        check(choice, PROMPT if choice["index"] < 3 else PROMPT[:7])
    asking = [opened.sampling.HasField("prompt_logprobs") for batch in stack.worker.batches for opened in batch.opens]
    assert sorted(asking) == [False] * 4 + [True] * 2, "asked once for each prompt"


@pytest.mark.composes("logprobs", "preemption")
async def test_who_is_preempted_is_told_everything_once(tmp_path):
    async with running_stack(tmp_path, worker={"blocks": 16, "max_model_len": 128}) as stack:
        prompts = [PROMPT[start : start + 30] for start in range(6)]
        bodies = await asyncio.gather(*(stack.complete(prompt, max_tokens=60, seed=5, **ASKED) for prompt in prompts))
        assert await stack.mesh.sample("num_preemptions_total", reason="no_blocks") > 0
    for prompt, body in zip(prompts, bodies, strict=True):
        check(body["choices"][0], prompt)


@pytest.mark.composes("logprobs", "worker loss", "leases", "dispatch-ahead", "seed")
@pytest.mark.parametrize("generated", [0, 20])
async def test_the_loss_of_the_worker_repeats_nothing(tmp_path, generated: int):
    async with running_stack(tmp_path, max_num_batched_tokens=17, max_lease_steps=4, worker={"step_seconds": 0.002}) as stack:
        task = asyncio.create_task(stack.complete(PROMPT, max_tokens=60, seed=2, **ASKED))
        requests = stack.mesh.state.requests
        await until(lambda: any(request.told and len(request.output_ids) >= generated for request in requests.values()))
        await stack.worker.stop()
        await stack.mesh.worker(max_model_len=MAX_MODEL_LEN)
        body = await task
    assert body["choices"][0]["token_ids"] == expected(PROMPT, max_tokens=60, seed=2)
    check(body["choices"][0], PROMPT)


@pytest.mark.composes("logprobs", "session loss", "n", "seed")
@pytest.mark.parametrize("generated", [0, 20])
async def test_the_loss_of_the_session_repeats_nothing(tmp_path, generated: int):
    async with running_stack(tmp_path, max_num_batched_tokens=17, worker={"step_seconds": 0.002}) as stack:
        task = asyncio.create_task(stack.complete(PROMPT, n=2, seed=6, max_tokens=60, **ASKED))
        requests = stack.mesh.state.requests
        await until(lambda: any(request.told and len(request.output_ids) >= generated for request in requests.values()))
        await stack.lose_session()
        body = await task
    for choice in body["choices"]:
        check(choice, PROMPT)


@pytest.mark.composes("logprobs", "streaming", "stop strings")
async def test_a_stream_joins_to_the_whole_answer(stack: Stack):
    """The prompt's come with the first tokens."""
    asked = {"max_tokens": 40, "seed": 3, "stop": ["q"], "ignore_eos": True, "return_token_ids": True, "logprobs": 1, "echo": True}
    whole = (await stack.complete(PROMPT, **asked))["choices"][0]
    response = await stack.gateway.complete(PROMPT, stream=True, **asked)
    events = [event["choices"][0] for event in events_of(response.text)[:-1]]
    joined = [value for event in events if event["logprobs"] for value in event["logprobs"]["token_logprobs"]]
    assert joined == whole["logprobs"]["token_logprobs"]
    assert joined[: len(PROMPT)] == [None, *(told(at, PROMPT[at]).unpack()[0].logprob for at in range(1, len(PROMPT)))]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_more_than_the_workers_list_is_a_400(stack: Stack, field: str):
    response = await stack.gateway.complete(PROMPT, **{field: 21})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert "at most 20" in response.json()["error"]["message"]
