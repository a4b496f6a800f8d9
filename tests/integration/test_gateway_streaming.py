"""Server-sent events: their shape, what they hold back, how errors travel in them, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.packing import unpack_ids
from tests.support.gateway_fakes import DEADLINE, EOS, FAILED, FakeScheduler, ids_of, say, silence
from tests.support.gateway_process import events_of, running_gateway
from tests.support.raw_http import RawClient


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def quiet(tmp_path):
    """A gateway whose scheduler says only what the test says."""
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


async def test_a_chat_stream_opens_with_the_role_and_closes_with_done(gateway):
    response = await gateway.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    assert {(event["id"], event["object"], event["model"]) for event in events[:-1]} == {
        (f"chatcmpl-{response.headers['x-request-id']}", "chat.completion.chunk", "tiny")
    }
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": letter} for letter in "hello"]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ({}, "stop", None)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all("usage" not in event for event in events[:-1])


async def test_a_completion_stream_is_text(gateway):
    events = events_of((await gateway.complete("a", stream=True)).text)
    assert [event["choices"][0]["text"] for event in events[:-1]] == [*"hello", ""]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[0]["object"] == "text_completion"


async def test_usage_comes_last_when_asked_for_and_is_null_before(gateway):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "user:hi\n"}),
    ):
        response = await gateway.client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        events = events_of(response.text)
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["prompt_tokens"] == 8
        assert events[-2]["usage"]["completion_tokens"] == 6


async def test_continuous_usage_counts_along(gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of((await gateway.chat(stream=True, stream_options=options)).text)
    counts = [event["usage"]["completion_tokens"] for event in events[1:-2]]
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_token_ids_come_with_their_chunks(gateway):
    events = events_of((await gateway.chat(stream=True, return_token_ids=True)).text)
    assert events[0]["prompt_token_ids"] == ids_of("user:hi\n")
    streamed = [token for event in events[1:-1] for token in event["choices"][0]["token_ids"]]
    assert streamed == [*ids_of("hello"), EOS]
    events = events_of((await gateway.complete([[1], [2]], stream=True, return_token_ids=True)).text)
    prompts = {}
    for event in events[:-1]:
        choice = event["choices"][0]
        prompts.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    assert {index: (given[0], set(given[1:])) for index, given in prompts.items()} == {0: ([1], {None}), 1: ([2], {None})}


@pytest.mark.composes("prompt list", "streaming")
async def test_several_prompts_stream_side_by_side_under_their_index(quiet):
    task = asyncio.create_task(quiet.complete(["a", "b"], stream=True))
    found = [await quiet.scheduler.submitted.get() for _ in range(2)]
    by_prompt = {bytes(unpack_ids(submit.prompt_ids)).decode(): submit.id for _, submit in found}
    session = found[0][0]
    for text, name in (("x", "a"), ("y", "b"), ("z", "a")):
        session.emit(by_prompt[name], ids_of(text))
    for name in ("b", "a"):
        session.emit(by_prompt[name], [EOS], ending=session.ending(by_prompt[name]))
    texts = {0: "", 1: ""}
    for event in events_of((await task).text)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "xz", 1: "y"}


async def test_half_a_character_waits_for_its_other_half(quiet):
    async with RawClient(quiet.port) as client:
        await client.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 100})
        session, submit = await quiet.scheduler.submitted.get()
        smile = list("🙂".encode())
        session.emit(submit.id, [*ids_of("a"), *smile[:2]])
        await client.read_until(b'"text":"a"')
        session.emit(submit.id, smile[2:])
        await client.read_until('"text":"🙂"'.encode())
        session.emit(submit.id, smile[:3], ending=session.ending(submit.id))
        await client.read_until('"text":"\ufffd"'.encode())


@pytest.mark.composes("stop strings", "streaming")
async def test_nothing_of_a_stop_string_leaks(quiet):
    task = asyncio.create_task(quiet.complete("a", stream=True, stop=["STOP"], max_tokens=100))
    session, submit = await quiet.scheduler.submitted.get()
    for piece in ("one ST", "ill STO"):
        session.emit(submit.id, ids_of(piece))
    kept = len("one STill ")
    session.emit(submit.id, ids_of("P and more"), ending=session.ending(submit.id, keep_bytes=kept, stop_string="STOP"))
    events = events_of((await task).text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "one STill "
    assert events[-2]["choices"][0]["stop_reason"] == "STOP"


async def test_a_stop_token_that_spells_text_is_cut(quiet):
    for stream in (True, False):
        task = asyncio.create_task(quiet.complete("a", stream=stream, stop_token_ids=[33], max_tokens=100))
        session, submit = await quiet.scheduler.submitted.get()
        session.emit(submit.id, ids_of("hi"))
        session.emit(submit.id, [33], ending=session.ending(submit.id, keep_bytes=2, stop_token=33))
        response = await task
        if stream:
            assert "".join(event["choices"][0]["text"] for event in events_of(response.text)[:-1]) == "hi"
        else:
            assert response.json()["choices"][0]["text"] == "hi"


async def test_deltas_that_piled_up_are_one_chunk(quiet):
    task = asyncio.create_task(quiet.complete("a", stream=True, max_tokens=100))
    session, submit = await quiet.scheduler.submitted.get()
    frame = session.delta(submit.id, ids_of("one "))
    frame.ids.append(submit.id)
    frame.first_indexes.append(4)
    frame.counts.append(3)
    frame.token_ids += bytes(byte for value in ids_of("two") for byte in (value, 0, 0, 0))
    session.put(frame)
    session.sent[submit.id] = 7
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    events = events_of((await task).text)
    assert events[0]["choices"][0]["text"] == "one two"


async def test_an_error_before_the_first_token_still_has_its_status(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(say("", reason=DEADLINE, eos=False))) as gateway:
        gateway.scheduler.behaviour = silence
        task = asyncio.create_task(gateway.chat(stream=True))
        session, submit = await gateway.scheduler.submitted.get()
        session.emit(submit.id, [], ending=session.ending(submit.id, DEADLINE))
        response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NON_FINITE, ErrorCode.NO_WORKER])
async def test_an_error_after_the_first_token_travels_in_the_stream(quiet, code):
    async with RawClient(quiet.port) as client:
        await client.post("/v1/completions", {"prompt": "a", "stream": True})
        session, submit = await quiet.scheduler.submitted.get()
        session.emit(submit.id, ids_of("partial"))
        await client.read_until(b"partial")
        session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=TokenloomError(code, "too bad").to_proto()))
        text = (await client.read_until(b"data: [DONE]\n\n")).decode()
    assert text.startswith("HTTP/1.1 200")
    error = text[text.index('data: {"error"') :].splitlines()[0].removeprefix("data: ")
    assert json.loads(error)["error"] == {
        "message": "too bad",
        "type": {500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}[code.spec.http_status],
        "param": None,
        "code": code.spec.label,
    }
    await quiet.until_idle()


async def test_openais_client_works_unchanged(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, temperature=0, seed=1)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hello", "stop")
        assert whole.usage.total_tokens == 14
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
        assert chunks[-1].usage.completion_tokens == 6
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=8)
        assert [choice.text for choice in completion.choices] == ["hello", "hello"]
        async with client.chat.completions.stream(model="tiny", messages=messages) as events:
            assert (await events.get_final_completion()).choices[0].message.content == "hello"


async def test_openais_client_sees_errors_as_its_own(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=messages, temperature=-1)
        assert (caught.value.param, caught.value.code, caught.value.type) == ("temperature", "invalid_request", "invalid_request_error")
        gateway.scheduler.behaviour = silence
        task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=messages, stream=True))
        session, submit = await gateway.scheduler.submitted.get()
        session.emit(submit.id, ids_of("par"))
        stream = await task
        session.emit(submit.id, [], ending=session.ending(submit.id, DEADLINE))
        with pytest.raises(openai.APIError, match="timeout"):
            async for _ in stream:
                pass
