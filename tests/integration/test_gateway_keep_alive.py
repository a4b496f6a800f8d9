"""Silent streams: comments keep proxies from cutting them, and clients notice nothing."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from libs.errors import ErrorCode
from tests.support.gateway_fakes import EOS, FAILED, FakeScheduler, ids_of, silence
from tests.support.gateway_process import running_gateway

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
async def quiet(tmp_path):
    """A gateway that comments every 50 ms and whose scheduler says only what the test says."""
    async with running_gateway(tmp_path, FakeScheduler(silence), sse_keep_alive=0.05) as running:
        yield running


async def until_comments(lines, count: int) -> None:
    """Reads until so many comments have come; nothing else may."""
    while count:
        line = await anext(lines)
        assert line in (": keep-alive", ""), line
        count -= line != ""


def finish(session, submit, text: str) -> None:
    session.emit(submit.id, [*ids_of(text), EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))


async def test_a_silent_stream_gets_comments_before_and_between_its_tokens(quiet):
    async with quiet.client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        session, submit = await quiet.scheduler.submitted.get()
        lines = response.aiter_lines()
        await until_comments(lines, 2)
        session.emit(submit.id, ids_of("a"))
        while '"content":"a"' not in (line := await anext(lines)):
            assert line == "" or line.startswith((": keep-alive", 'data: {"id"')), line
        await anext(lines)
        await until_comments(lines, 2)
        finish(session, submit, "b")
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0][6:])["choices"][0]["delta"] == {"content": "b"}


async def test_openai_s_client_skips_them(quiet):
    async with openai.AsyncOpenAI(base_url=f"{quiet.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True)
        session, submit = await quiet.scheduler.submitted.get()
        finish(session, submit, "hello")
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


async def test_an_error_has_its_own_status_until_the_first_comment_and_is_an_event_after_it(quiet):
    async with quiet.client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        session, submit = await quiet.scheduler.submitted.get()
        lines = response.aiter_lines()
        await until_comments(lines, 1)
        spec = ErrorCode.NO_WORKER
        session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error={"code": spec.spec.code, "message": "gone"}))
        rest = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0][6:])["error"]["code"] == "no_worker"
    assert rest[1:] == ["data: [DONE]"]


@pytest.mark.parametrize("interval", [0, 30])
async def test_without_an_interval_or_before_its_end_an_error_keeps_its_status(tmp_path, interval):
    async with running_gateway(tmp_path, FakeScheduler(silence), sse_keep_alive=interval) as gateway:
        asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=CHAT))
        session, submit = await gateway.scheduler.submitted.get()
        code = ErrorCode.NO_WORKER.spec.code
        session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error={"code": code, "message": "gone"}))
        response = await asked
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")


async def test_an_answer_in_one_piece_has_none(quiet):
    asked = asyncio.create_task(quiet.client.post("/v1/chat/completions", json={**CHAT, "stream": False}))
    session, submit = await quiet.scheduler.submitted.get()
    await asyncio.sleep(0.2)  # four times the interval: had it comments, they would be there
    finish(session, submit, "whole")
    response = await asked
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"][0]["message"]["content"] == "whole"


async def test_a_client_that_leaves_a_silent_stream_is_noticed(quiet):
    async with quiet.client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        await quiet.scheduler.submitted.get()
        await until_comments(response.aiter_lines(), 1)
    assert (await quiet.scheduler.cancels.get()).reason
    await quiet.until_idle()
