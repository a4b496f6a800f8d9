"""Gateway and scheduler together, over a worker that models block contents: what clients are told of the prefix cache, n and limits."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway_core import MAX_MODEL_LEN, Stack, cached_of, expected, running_stack, spell
from tests.support.gateway_process import events_of, until
from tests.support.raw_http import RawClient
from tests.support.scheduler_mesh import params

# Three full blocks and a tail.
PROMPT = [1 + index % 37 for index in range(50)]
FULL = 48


@pytest.fixture
async def stack(tmp_path):
    async with running_stack(tmp_path) as running:
        yield running


async def tokens_of(stack: Stack, *args, **fields) -> tuple[list[list[int]], int]:
    body = await stack.complete(*args, **fields)
    return [choice["token_ids"] for choice in body["choices"]], cached_of(body)


@pytest.mark.composes("prefix caching", "seed")
async def test_the_second_of_two_equal_prompts_is_cached_and_the_answer_the_same(stack):
    first = await tokens_of(stack, PROMPT, seed=3)
    second = await tokens_of(stack, PROMPT, seed=3)
    assert first == ([expected(PROMPT, seed=3)], 0)
    assert second == ([expected(PROMPT, seed=3)], FULL)


@pytest.mark.composes("prefix caching", "cache_salt")
async def test_a_salt_finds_its_own_blocks_and_nobody_elses(stack):
    assert (await tokens_of(stack, PROMPT))[1] == 0
    assert (await tokens_of(stack, PROMPT, cache_salt="ours"))[1] == 0, "not those without a salt"
    assert (await tokens_of(stack, PROMPT, cache_salt="theirs"))[1] == 0, "nor those of another"
    for salt in ("ours", "theirs"):
        assert (await tokens_of(stack, PROMPT, cache_salt=salt))[1] == FULL
    assert (await tokens_of(stack, PROMPT))[1] == FULL
    assert (await tokens_of(stack, PROMPT, cache_salt="ours "))[1] == 0


@pytest.mark.composes("prefix caching", "cache_salt", "seed")
async def test_a_salt_keeps_outputs_apart_too(stack):
    """A conversation's next turn hits the blocks of the last answer, and only under its own salt."""
    body = await stack.complete(PROMPT, max_tokens=20, cache_salt="ours", seed=1)
    longer = [*PROMPT, *body["choices"][0]["token_ids"], 5, 6]
    assert (await tokens_of(stack, longer, cache_salt="theirs"))[1] == 0
    assert (await tokens_of(stack, longer))[1] == 0
    assert (await tokens_of(stack, longer, cache_salt="ours"))[1] == 64


async def test_chats_and_completions_of_one_salt_share_it(stack):
    chat = spell("user:" + "a" * 40 + "\n")
    response = await stack.gateway.chat("a" * 40, max_tokens=4, cache_salt="ours")
    assert cached_of(response.json()) == 0
    assert (await tokens_of(stack, chat, cache_salt="ours"))[1] == 32
    assert cached_of((await stack.gateway.chat("a" * 40, max_tokens=4, cache_salt="ours")).json()) == 32


async def test_without_prefix_caching_nothing_is_cached_and_0_is_shown(tmp_path):
    async with running_stack(tmp_path, enable_prefix_caching=False) as stack:
        for _ in range(2):
            assert await tokens_of(stack, PROMPT, seed=3) == ([expected(PROMPT, seed=3)], 0)


@pytest.mark.composes("prefix caching", "n", "prompt list")
async def test_usage_adds_up_to_the_counters_of_the_cache(stack):
    cached = prompts = 0
    for length, n in ((50, 1), (50, 3), (33, 2), (16, 1), (50, 4), (7, 2), (49, 1)):
        body = await stack.complete([PROMPT[:length], PROMPT[1:length]], n=n)
        cached += cached_of(body)
        prompts += body["usage"]["prompt_tokens"]
    assert cached > 0
    assert await stack.mesh.sample("prefix_cache_hits_total") == cached
    assert await stack.mesh.sample("prefix_cache_queries_total") == prompts


@pytest.mark.composes("prefix caching", "streaming")
async def test_a_stream_tells_of_cached_tokens_in_its_usage(stack):
    await stack.complete(PROMPT)
    options = {"include_usage": True}
    response = await stack.gateway.complete(PROMPT, max_tokens=4, ignore_eos=True, stream=True, stream_options=options)
    assert events_of(response.text)[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": FULL}


@pytest.mark.composes("n", "prefix caching", "seed")
async def test_choices_share_the_prompt_and_count_it_once(stack):
    body = await stack.complete(PROMPT, n=4, seed=9)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"], cached_of(body)) == (50, 32, 0)
    again = await stack.complete(PROMPT, n=4, seed=9)
    assert cached_of(again) == FULL
    assert [choice["token_ids"] for choice in again["choices"]] == [choice["token_ids"] for choice in body["choices"]]


@pytest.mark.composes("n", "worker loss", "seed")
async def test_choices_survive_the_loss_of_the_worker(stack):
    alone = await stack.complete(PROMPT, n=3, seed=9, max_tokens=30)
    stack.worker.gate.clear()
    task = asyncio.create_task(stack.complete(PROMPT, n=3, seed=9, max_tokens=30))
    await until(lambda: len(stack.mesh.state.requests) == 3)
    await stack.worker.stop()
    await stack.mesh.worker(max_model_len=MAX_MODEL_LEN)
    assert [choice["token_ids"] for choice in (await task)["choices"]] == [choice["token_ids"] for choice in alone["choices"]]


@pytest.mark.composes("n", "session loss", "seed")
async def test_choices_survive_the_loss_of_the_session(tmp_path):
    async with running_stack(tmp_path, worker={"step_seconds": 0.002}) as stack:
        alone = await stack.complete(PROMPT, n=3, seed=9, max_tokens=60)
        task = asyncio.create_task(stack.complete(PROMPT, n=3, seed=9, max_tokens=60))
        await until(lambda: any(len(request.output_ids) > 5 for request in stack.mesh.state.requests.values()))
        await stack.lose_session()
        body = await task
        assert [choice["token_ids"] for choice in body["choices"]] == [choice["token_ids"] for choice in alone["choices"]]
        assert body["usage"]["completion_tokens"] == 180
        assert await stack.gateway.metric("tokenloom:gateway_resumed_requests_total") > 0


@pytest.mark.composes("n", "prompt list", "cancel")
async def test_a_client_that_leaves_takes_all_its_choices_out_of_the_scheduler(stack):
    stack.worker.gate.clear()
    task = asyncio.create_task(stack.complete([PROMPT, PROMPT[:20]], n=2))
    await until(lambda: len(stack.mesh.state.requests) == 4)
    task.cancel()
    await until(lambda: not stack.mesh.state.requests)
    stack.worker.gate.set()
    await stack.gateway.until_idle()


async def test_what_fills_the_context_runs_and_one_token_more_is_a_400(tmp_path):
    """The cache holds one sequence of full length and nothing beside it."""
    async with running_stack(tmp_path, worker={"blocks": MAX_MODEL_LEN // 16}) as stack:
        body = await stack.complete(PROMPT, max_tokens=MAX_MODEL_LEN - len(PROMPT))
        assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
        response = await stack.gateway.complete(PROMPT, max_tokens=MAX_MODEL_LEN - len(PROMPT) + 1)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "prompt_too_long", "max_tokens")
        response = await stack.gateway.complete([1] * MAX_MODEL_LEN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.composes("bounded queue", "several gateways")
@pytest.mark.composes("worker loss", "streaming")
async def test_what_no_longer_fits_into_the_worker_that_came_back_is_told_so(tmp_path):
    """Before the first byte with a status and the parameter that could be smaller, after it with an event."""
    async with running_stack(tmp_path, worker={"step_seconds": 0.002}) as stack, RawClient(stack.gateway.port) as reading:
        long = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        await reading.post("/v1/completions", {**long, "stream": True})
        await reading.read_until(b"data: ")
        stack.worker.gate.clear()
        whole = asyncio.create_task(stack.gateway.client.post("/v1/completions", json=long))
        short = asyncio.create_task(stack.complete(PROMPT, seed=1))
        await until(lambda: len(stack.mesh.state.requests) == 3)
        await stack.worker.stop()
        await stack.mesh.worker(max_model_len=64, blocks=4)
        await until(lambda: stack.gateway.mesh.session.facts.max_model_len == 64)
        stack.mesh.pass_grace()
        error = (await whole).json()["error"]
        assert ((await whole).status_code, error["code"], error["param"]) == (400, "cannot_fit", "max_tokens")
        assert b'"code":"cannot_fit"' in await reading.read_until(b"data: [DONE]")
        assert (await short)["choices"][0]["token_ids"] == expected(PROMPT, seed=1)
        assert (await stack.gateway.complete(PROMPT, max_tokens=15)).json()["error"]["code"] == "prompt_too_long"


async def test_a_full_queue_is_a_429_with_retry_after(tmp_path):
    async with running_stack(tmp_path, max_queue=1) as stack:
        stack.worker.gate.clear()
        other = await stack.mesh.session(gateway=5)
        await other.ready()
        await other.submit(1, PROMPT, params(max_tokens=2))
        await other.until(lambda: other.received[1].accepted)
        response = await stack.gateway.complete(PROMPT)
        assert response.status_code == 429
        assert response.json()["error"]["code"] in ("queue_full", "over_window")
        assert int(response.headers["retry-after"]) >= 1
        stack.worker.gate.set()
        await other.ended(1)
        await stack.gateway.until_idle()


@pytest.mark.refuses("priority", reason="unless the queue is ordered by it: `--scheduling-policy priority`")
async def test_a_priority_is_refused_where_the_queue_knows_none(stack):
    response = await stack.gateway.complete(PROMPT, priority=-3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in response.json()["error"]["message"]
    assert (await stack.gateway.complete(PROMPT, priority=0)).status_code == 200


@pytest.mark.composes("priority")
async def test_lower_priorities_run_first_under_the_priority_policy(tmp_path):
    async with running_stack(tmp_path, scheduling_policy="priority", max_num_seqs=1) as stack:
        stack.worker.gate.clear()
        tasks = []
        for number, (length, priority) in enumerate(((40, 0), (20, 7), (30, -7), (25, 0)), 1):
            tasks.append(asyncio.create_task(stack.complete(PROMPT[:length], priority=priority)))
            await until(lambda number=number: len(stack.mesh.state.requests) == number)
            await stack.worker.wait_batches(1)
        stack.worker.gate.set()
        await asyncio.gather(*tasks)
        opened = [len(entry.prompt_ids) // 4 for batch in stack.worker.batches for entry in batch.opens]
        assert list(dict.fromkeys(opened)) == [40, 30, 25, 20]
