"""The pool of encoder processes: parallel, bounded, and stopped by no prompt. Real processes, a tiny model, templates that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog

from libs.clock import SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.pool import EncoderPool
from tests.support.tiny_llama import make_tiny_llama
from tokenloom.tokenizer.v1 import tokenizer_pb2

# `spin` runs for hours, `eat` asks for 10 GB, as does a constant that Jinja computes while it compiles; anything else is echoed.
TEMPLATE = (
    "{% if mode == 'spin' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif mode == 'eat' %}{{ messages[0].content * 10000000000 }}"
    "{% elif mode == 'constant' %}{{ 'x' * 10000000000 }}{% else %}{{ messages[0].content }}{% endif %}"
)
TEXT = tokenizer_pb2.EncodeRequest(text="a")


def chat(mode: str) -> tokenizer_pb2.EncodeRequest:
    messages = json.dumps([{"role": "user", "content": "b"}]).encode()
    return tokenizer_pb2.EncodeRequest(
        chat=tokenizer_pb2.Chat(messages_json=messages, template_kwargs_json=json.dumps({"mode": mode}).encode())
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("pool") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@asynccontextmanager
async def running(model, *, size=1, max_waiting=8, time_limit=60.0) -> AsyncIterator[tuple[EncoderPool, TokenizerMetrics]]:
    metrics = TokenizerMetrics()
    command = [sys.executable, "-m", "services.tokenizer.encoder_process", str(model), str(1 << 28)]
    pool = EncoderPool(command, size=size, max_waiting=max_waiting, time_limit=time_limit, clock=SystemClock(), metrics=metrics)
    await pool.start()
    try:
        yield pool, metrics
    finally:
        await pool.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def value(metrics: TokenizerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"tokenloom:{name}", labels) or 0.0


async def is_refused(call, code: ErrorCode) -> str:
    with pytest.raises(TokenloomError) as caught:
        await call
    assert caught.value.code is code
    return caught.value.message


async def test_prompts_come_back_to_their_own_callers(model):
    async with running(model, size=2, max_waiting=64) as (pool, _):
        requests = [tokenizer_pb2.EncodeRequest(token_ids=tokenizer_pb2.TokenIds(ids=pack_ids([i]))) for i in range(3, 60)]
        answers = await asyncio.gather(*(pool.encode(request) for request in requests))
        assert [answer.token_ids for answer in answers] == [request.token_ids.ids for request in requests]


async def test_processes_work_at_the_same_time_and_a_hanging_template_holds_up_only_its_own(model):
    async with running(model, size=2) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        # With one interpreter's lock, or one process, these would wait behind the template for hours.
        for _ in range(3):
            assert (await pool.encode(chat("echo"))).token_ids == pack_ids([3 + ord("b")])
        assert not spinning.done()
        spinning.cancel()


async def test_a_prompt_that_takes_too_long_is_refused_and_its_process_replaced(model):
    async with running(model, time_limit=0.3) as (pool, metrics):
        before = pool.pids
        assert "0.3 s" in await is_refused(pool.encode(chat("spin")), ErrorCode.TEMPLATE_ERROR)
        assert (await pool.encode(TEXT)).token_ids
        assert pool.pids != before
        assert value(metrics, "tokenizer_process_restarts_total", reason="timeout") == 1


async def test_a_process_that_a_prompt_broke_is_logged_with_the_prompts_trace(model, monkeypatch):
    lines = []
    monkeypatch.setattr("libs.helper_pool._log.warning", lambda event, **fields: lines.append(fields))
    async with running(model, time_limit=0.3) as (pool, _):
        with structlog.contextvars.bound_contextvars(trace_id="f" * 32):
            await is_refused(pool.encode(chat("spin")), ErrorCode.TEMPLATE_ERROR)
        assert (await pool.encode(TEXT)).token_ids
    assert [(line["reason"], line["trace_id"]) for line in lines] == [("timeout", "f" * 32)]


@pytest.mark.parametrize("mode", ["eat", "constant"])
async def test_a_template_that_takes_too_much_memory_is_refused(model, mode):
    async with running(model) as (pool, _):
        assert "memory" in await is_refused(pool.encode(chat(mode)), ErrorCode.TEMPLATE_ERROR)
        assert (await pool.encode(TEXT)).token_ids


SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source", [SPIN, "{{ messages[0].content * 10000000000 }}", "{{ 'x' * 10000000000 }}"], ids=["spin", "eat", "constant"]
)
async def test_a_client_s_own_template_is_held_to_the_same_limits(model, source):
    request = chat("")
    request.chat.template = source
    async with running(model, time_limit=1.0) as (pool, _):
        await is_refused(pool.encode(request), ErrorCode.TEMPLATE_ERROR)
        assert (await pool.encode(TEXT)).token_ids


async def test_a_full_queue_refuses_and_says_when_to_come_back(model):
    async with running(model, max_waiting=2) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        waiting = [asyncio.create_task(pool.encode(TEXT)) for _ in range(2)]
        await until(lambda: pool.waiting == 2)
        with pytest.raises(TokenloomError) as caught:
            await pool.encode(TEXT)
        assert (caught.value.code, caught.value.retry_after_ms) == (ErrorCode.TOKENIZER_BUSY, 1000)
        spinning.cancel()
        assert all(answer.token_ids for answer in await asyncio.gather(*waiting))


async def test_a_caller_that_leaves_gives_its_place_in_the_queue_back(model):
    async with running(model, max_waiting=1) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        leaving = asyncio.create_task(pool.encode(TEXT))
        await until(lambda: pool.waiting == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert pool.waiting == 0
        spinning.cancel()


async def test_work_whose_caller_left_does_not_keep_a_process(model):
    async with running(model) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        spinning.cancel()
        assert (await pool.encode(TEXT)).token_ids
        assert value(metrics, "tokenizer_process_restarts_total", reason="abandoned") == 1


async def test_processes_that_were_killed_while_idle_cost_no_prompt(model):
    async with running(model, size=2) as (pool, metrics):
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(pool.encode(TEXT) for _ in range(4)))
        assert all(answer.token_ids for answer in answers)
        assert value(metrics, "tokenizer_process_restarts_total", reason="died") >= 1


async def test_a_prompt_whose_process_dies_gets_one_more_and_no_third(model):
    async with running(model) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        for round_ in range(2):
            await until(lambda died=round_: value(metrics, "tokenizer_process_restarts_total", reason="died") == died)
            await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
            os.kill(pool.pids[0], signal.SIGKILL)
        assert "two processes for rendering and encoding the chat died" in await is_refused(spinning, ErrorCode.INVALID_REQUEST)
        assert (await pool.encode(TEXT)).token_ids


async def test_closing_refuses_what_is_inside_and_ends_all_processes(model):
    async with running(model) as (pool, metrics):
        inside = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        waiting = asyncio.create_task(pool.encode(TEXT))
        await until(lambda: pool.waiting == 1)
        pids = pool.pids
        await pool.close()
        for call in (inside, waiting):
            await is_refused(call, ErrorCode.DRAINING)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_closing_at_once_leaves_no_process_behind(model):
    async with running(model, size=2) as (pool, _):
        pids = pool.pids
        await pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_process_that_cannot_load_fails_the_start(tmp_path):
    with pytest.raises(TokenloomError, match="cannot start"):
        async with running(tmp_path, size=2):
            pass


async def test_queue_time_is_measured_where_a_prompt_waits(model):
    async with running(model) as (pool, metrics):
        spinning = asyncio.create_task(pool.encode(chat("spin")))
        await until(lambda: value(metrics, "tokenizer_pool_busy") == 1)
        waiting = asyncio.create_task(pool.encode(TEXT))
        await until(lambda: pool.waiting == 1)
        spinning.cancel()
        assert (await waiting).queue_us > 100_000  # at least the abandoned prompt's grace and a new process
        assert value(metrics, "tokenizer_queue_seconds_count") == 2
