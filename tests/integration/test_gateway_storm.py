"""Everything at once, from HTTP to blocks that are checked at every read: whatever is going on, each client gets the tokens it gets alone.

The cache holds one sequence of full length and a little more, so that those who run together must preempt each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.gateway_core import MAX_MODEL_LEN, Stack, joined_gateway, running_stack
from tests.support.gateway_process import Gateway, events_of, until
from tests.support.raw_http import RawClient

PROMPT = [1 + index % 37 for index in range(50)]
OTHER = [2 + index % 31 for index in range(40)]
TIGHT = {"blocks": MAX_MODEL_LEN // 16 + 2, "step_seconds": 0.001}
# So few tokens in a step that every prompt is computed in chunks.
SMALL_STEP = 24
# What the wishes and the small cache bring with them.
STORM = ("preemption", "prefix caching", "cache_salt", "n", "prompt list", "seed", "stop strings", "streaming")
# For what comes by itself, on a machine of any load.
PATIENCE = 60.0


@dataclass(frozen=True)
class Answer:
    """What a client has at the end: per choice its tokens, text and finish reason; and the usage without what the cache gave."""

    choices: list[tuple[list[int], str, str]]
    prompt_tokens: int
    completion_tokens: int


def body(prompt: Sequence[Any], **fields: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **fields}


async def ask(gateway: Gateway, wish: dict[str, Any]) -> Answer:
    """The wish granted, streamed or not."""
    response = await gateway.client.post("/v1/completions", json=wish)
    assert response.status_code == 200, response.text
    if not wish.get("stream"):
        whole = response.json()
        choices = [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
        return Answer(choices, whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])
    found: dict[int, tuple[list[int], str, str]] = {}
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    for event in events[:-2]:
        (choice,) = event["choices"]
        tokens, text, _ = found.get(choice["index"], ([], "", ""))
        found[choice["index"]] = ([*tokens, *choice["token_ids"]], text + choice["text"], choice["finish_reason"])
    usage = events[-2]["usage"]
    return Answer([found[index] for index in sorted(found)], usage["prompt_tokens"], usage["completion_tokens"])


async def wishes(stack: Stack) -> list[tuple[dict[str, Any], Answer]]:
    """Requests of every kind, each with what it yields alone."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = await ask(stack.gateway, body(PROMPT, seed=4))
    stop = plain.choices[0][1][20:23]
    asked = [
        body(PROMPT, seed=1, n=3, **streamed),
        body([PROMPT[:33], OTHER[:20]], seed=2, n=2),
        body(PROMPT, seed=3, cache_salt="ours"),
        body(PROMPT, seed=4, stop=[stop]),
        body(OTHER, seed=5, cache_salt="ours", **streamed),
        body(OTHER, seed=6, temperature=0.5, **streamed),
        body([PROMPT, OTHER], seed=7, max_tokens=30),
    ]
    answers = [await ask(stack.gateway, wish) for wish in asked]
    assert answers[3].choices[0][1:] == (plain.choices[0][1].split(stop)[0], "stop")
    return list(zip(asked, answers, strict=True))


async def storm(stack: Stack, disturb: Callable[[], Awaitable[None]] | None = None) -> None:
    """All wishes at once, with falling priorities where those are served; `disturb` happens as soon as somebody has been preempted."""
    expected = await wishes(stack)
    counters, before = stack.mesh.state.counters, stack.mesh.state.counters.preemptions
    priorities = stack.mesh.config.scheduling_policy == "priority"
    asking = [
        asyncio.create_task(ask(stack.gateway, {**wish, "priority": 3 - number if priorities else 0}))
        for number, (wish, _) in enumerate(expected)
    ]
    await until(lambda: counters.preemptions > before, PATIENCE)
    if disturb is not None:
        await disturb()
    for task, (wish, answer) in zip(asking, expected, strict=True):
        assert await task == answer, wish


@pytest.fixture
async def stack(tmp_path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, worker=TIGHT, scheduling_policy="priority", max_num_batched_tokens=SMALL_STEP) as running:
        yield running


@pytest.mark.composes(*STORM, "dispatch-ahead")
async def test_in_a_cache_that_is_too_small_everybody_gets_the_tokens_it_gets_alone(tmp_path):
    async with running_stack(tmp_path, worker=TIGHT) as stack:
        await storm(stack)
        assert stack.worker.overlaps > 0


@pytest.mark.composes("preemption", "n", "prompt list", "seed", "stop strings", "streaming")
async def test_without_prefix_caching_nothing_changes(tmp_path):
    async with running_stack(tmp_path, worker=TIGHT, enable_prefix_caching=False) as stack:
        await storm(stack)
        assert stack.mesh.state.counters.prefix_hits == 0


@pytest.mark.composes(*STORM, "priority", "chunked prefill")
async def test_priorities_and_small_steps_change_the_order_and_no_token(stack):
    await storm(stack)
    assert max(tokens for _, tokens in stack.worker.model.steps) <= SMALL_STEP


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "worker loss")
async def test_a_worker_that_dies_meanwhile_costs_no_token(stack):
    async def replace() -> None:
        await stack.worker.stop()
        await stack.mesh.worker(max_model_len=MAX_MODEL_LEN, **TIGHT)

    await storm(stack, replace)


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "session loss")
async def test_a_session_that_is_lost_meanwhile_costs_no_token(stack):
    await storm(stack, stack.lose_session)
    assert await stack.gateway.metric("tokenloom:gateway_resumed_requests_total") > 0


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "failed batches")
async def test_batches_that_fail_meanwhile_cost_no_token(stack):
    async def fail() -> None:
        stack.worker.fail_steps = 2

    await storm(stack, fail)
    assert stack.worker.fail_steps == 0


@pytest.mark.composes(*STORM, "several workers", "worker loss")
async def test_of_two_workers_one_dies_and_no_token_changes(tmp_path):
    async with running_stack(tmp_path, worker=TIGHT, static_workers=2) as stack:
        second = await stack.mesh.worker(1, max_model_len=MAX_MODEL_LEN, **TIGHT)
        await until(lambda: len(stack.mesh.state.groups) == 2, PATIENCE)
        await storm(stack, stack.worker.stop)
        assert stack.worker.batches
        assert second.batches


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "cancel")
async def test_clients_that_leave_meanwhile_take_nothing_from_the_others(stack):
    state = stack.mesh.state

    async def come_and_go() -> None:
        stack.worker.gate.clear()
        async with RawClient(stack.gateway.port) as first, RawClient(stack.gateway.port) as second:
            await first.post("/v1/completions", body(PROMPT, n=2, stream=True, max_tokens=150))
            await second.post("/v1/completions", body([OTHER, PROMPT], max_tokens=150))
            await until(lambda: sum(request.sampling.max_tokens == 150 for request in state.requests.values()) == 4, PATIENCE)
        await until(lambda: state.counters.cancelled == 4, PATIENCE)
        stack.worker.gate.set()

    await storm(stack, come_and_go)


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "deadline")
async def test_a_deadline_that_passes_meanwhile_ends_its_own_request_only(stack):
    async def too_late() -> None:
        stack.worker.gate.clear()
        response = await stack.gateway.client.post("/v1/completions", json=body(PROMPT, n=2, timeout=0.1, max_tokens=150))
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        stack.worker.gate.set()

    await storm(stack, too_late)


@pytest.mark.composes(*STORM, "priority", "chunked prefill", "several gateways", "cancel")
async def test_a_second_gateway_and_its_death_change_no_token_of_the_first(tmp_path, stack):
    folder = tmp_path / "second"
    folder.mkdir()

    state = stack.mesh.state

    async def beside() -> None:
        async with joined_gateway(folder, stack) as second:
            answer = await ask(second, body(PROMPT, n=2, seed=1))
            assert answer == await ask(second, body(PROMPT, n=2, seed=1))
            stack.worker.gate.clear()
            asking = asyncio.create_task(ask(second, body(PROMPT, n=2, max_tokens=150)))
            await until(lambda: sum(request.sampling.max_tokens == 150 for request in state.requests.values()) == 2, PATIENCE)
            await second.mesh.close()
            await until(lambda: state.counters.cancelled == 2, PATIENCE)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            stack.worker.gate.set()

    await storm(stack, beside)


@pytest.mark.composes(
    *STORM,
    "priority",
    "chunked prefill",
    "dispatch-ahead",
    "failed batches",
    "cancel",
    "deadline",
    "worker loss",
    "session loss",
    "several workers",
    "several gateways",
)
async def test_all_of_it_at_once_changes_no_token(tmp_path):
    (tmp_path / "second").mkdir()
    small = {"scheduling_policy": "priority", "max_num_batched_tokens": SMALL_STEP}
    async with running_stack(tmp_path, worker=TIGHT, static_workers=2, **small) as stack:
        doomed = await stack.mesh.worker(1, max_model_len=MAX_MODEL_LEN, **TIGHT)
        await until(lambda: len(stack.mesh.state.groups) == 2, PATIENCE)
        overlaps, state = stack.worker.overlaps, stack.mesh.state

        async def everything() -> None:
            async with joined_gateway(tmp_path / "second", stack) as second, RawClient(second.port) as leaving:
                stack.worker.fail_steps = 1
                await leaving.post("/v1/completions", body(OTHER, n=2, stream=True, max_tokens=150))
                late = asyncio.create_task(second.client.post("/v1/completions", json=body(PROMPT, n=2, timeout=0.05, max_tokens=200)))
                beside = asyncio.create_task(ask(second, body(PROMPT, n=2, seed=1)))
                await until(lambda: sum(request.sampling.max_tokens == 150 for request in state.requests.values()) == 2, PATIENCE)
                leaving.leave()
                await stack.lose_session()
                await doomed.stop()
                answer = await beside
                assert (await late).status_code == 504
                assert answer == await ask(second, body(PROMPT, n=2, seed=1))

        await storm(stack, everything)
        assert stack.worker.overlaps > overlaps
        assert stack.worker.fail_steps == 0
        assert state.counters.failed == 0
        assert state.counters.cancelled > 0
