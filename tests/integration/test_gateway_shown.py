"""What responses show beside text, over HTTP and to OpenAI's client: log-probabilities, echo, best_of; and how failures end them."""

from __future__ import annotations

import asyncio
import json
import struct

import openai
import pytest

from libs.errors import ErrorCode, TokenloomError
from tests.support.gateway_fakes import EOS, FAILED, FakeScheduler, ids_of, say, silence
from tests.support.gateway_process import Gateway, events_of, running_gateway, until

SMILE = "h\U0001f642"
DEAD_END = TokenloomError(ErrorCode.DEAD_END, "the constraint allows no further token").to_proto()


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(say(SMILE))) as running:
        yield running


@pytest.fixture
async def quiet(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


@pytest.mark.composes("logprobs", "streaming", "n")
async def test_a_stream_lists_the_tokens_that_the_whole_response_lists(gateway):
    fields = {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = (await gateway.chat("hi", **fields)).json()
    listed = [[], []]
    for event in events_of((await gateway.chat("hi", stream=True, **fields)).text)[:-1]:
        (choice,) = event["choices"]
        listed[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert listed == [choice["logprobs"]["content"] for choice in whole["choices"]]
    assert b"".join(bytes(token["bytes"]) for token in listed[0]).decode() == SMILE


@pytest.mark.composes("logprobs", "streaming", "stop strings")
async def test_log_probabilities_come_with_their_tokens_although_the_text_is_held_back(quiet):
    task = asyncio.create_task(quiet.complete("a", stream=True, stop=["STOP"], logprobs=0, max_tokens=100))
    session, submit = await quiet.scheduler.submitted.get()
    session.emit(submit.id, ids_of("xST"))
    await until(lambda: _delivered(quiet) == 3)
    session.emit(submit.id, ids_of("ill"), ending=session.ending(submit.id))
    first, second = [event["choices"][0] for event in events_of((await task).text)[:-1]]
    assert (first["text"], first["logprobs"]["tokens"], first["logprobs"]["text_offset"]) == ("x", ["x", "S", "T"], [0, 1, 2])
    assert (second["text"], second["logprobs"]["tokens"], second["logprobs"]["text_offset"]) == ("STill", ["i", "l", "l"], [3, 4, 5])


@pytest.mark.composes("logprobs", "session loss", "streaming")
async def test_after_a_lost_session_each_token_is_listed_once(quiet):
    task = asyncio.create_task(quiet.complete("ab", stream=True, echo=True, logprobs=1, max_tokens=100))
    session, submit = await quiet.scheduler.submitted.get()
    session.emit(submit.id, ids_of("one"))
    await until(lambda: _delivered(quiet) == 3)
    session.close()
    session, again = await quiet.scheduler.submitted.get()
    session.emit(again.id, ids_of(" two"), ending=session.ending(again.id))
    choices = [event["choices"][0] for event in events_of((await task).text)[:-1]]
    assert "".join(choice["text"] for choice in choices) == "abone two"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == [*"abone two"]


def _delivered(gateway: Gateway) -> int:
    """Tokens that readers have taken."""
    return sum(choice.ticket.taken for generation in gateway.mesh.open for choice in generation.choices)


@pytest.mark.composes("logprobs", "n", "prompt list")
async def test_openais_client_reads_log_probabilities(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=3, n=2)
        for choice in chat.choices:
            assert [token.token for token in choice.logprobs.content] == ["h", "\\xf0", "\\x9f", "\\x99", "\\x82", "<eos>"]
            assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * 6
        text = await client.completions.create(model="tiny", prompt=["ab", "c"], logprobs=2, echo=True, max_tokens=9)
        assert [choice.text for choice in text.choices] == [f"ab{SMILE}", f"c{SMILE}"]
        assert text.choices[0].logprobs.token_logprobs == [None, *[-0.5] * 7]
        assert text.choices[0].logprobs.text_offset == [0, 1, 2, 3, 3, 3, 3, 4]
        extra = {"prompt_logprobs": 1}
        chat = await client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
        assert chat.prompt_logprobs[0] is None
        assert chat.prompt_logprobs[1] == {"115": {"logprob": -0.5, "rank": 1, "decoded_token": "s"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_long_lists_are_written_beside_the_loop(tmp_path, monkeypatch, stream):
    beside = []
    to_thread = asyncio.to_thread

    async def spy(write):
        beside.append(write)
        return await to_thread(write)

    async with running_gateway(tmp_path, FakeScheduler(say("ok"))) as gateway:
        monkeypatch.setattr(asyncio, "to_thread", spy)
        for length in (10, 200):
            response = await gateway.complete("x" * length, echo=True, logprobs=1, stream=stream)
            bodies = events_of(response.text)[:-1] if stream else [response.json()]
            listed = [token for body in bodies for token in body["choices"][0]["logprobs"]["tokens"]]
            assert listed == [*"x" * length, "o", "k", "<eos>"]
            assert len(beside) == (length == 200)


async def test_an_echo_alone_is_the_prompt_and_ends_by_length(gateway):
    whole = (await gateway.complete("abc", echo=True, max_tokens=0, logprobs=1)).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("abc", "length", ["a", "b", "c"])
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (0, 3)


async def test_the_best_of_several_are_shown_in_falling_order(quiet):
    task = asyncio.create_task(quiet.complete("a", n=2, best_of=3, max_tokens=9))
    submits = [await quiet.scheduler.submitted.get() for _ in range(3)]
    session = submits[0][0]
    for (_, submit), text in zip(submits, ("bad", "good", "best"), strict=True):
        frame = session.delta(submit.id, [*ids_of(text), EOS])
        value = {"bad": -9.0, "good": -2.0, "best": -1.0}[text]
        width = len(text) + 1
        frame.logprobs[0].logprobs = b"".join([_float(value)] * width * (frame.logprobs[0].alternatives + 1))
        frame.endings.append(session.ending(submit.id))
        session.put(frame)
    answer = (await task).json()
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [(0, "best", None), (1, "good", None)]
    assert answer["usage"]["completion_tokens"] == 4 + 5 + 5


def _float(value: float) -> bytes:
    return struct.pack("<f", value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_end_before_any_token_is_a_422(quiet, stream):
    task = asyncio.create_task(quiet.chat("a", stream=stream))
    session, submit = await quiet.scheduler.submitted.get()
    session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=DEAD_END))
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (422, "constraint_dead_end")
    await quiet.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_came_with_a_failure_are_in_the_stream_before_its_error(quiet, stream):
    task = asyncio.create_task(quiet.chat("a", stream=stream, n=2))
    (session, first), (_, second) = [await quiet.scheduler.submitted.get() for _ in range(2)]
    session.emit(first.id, ids_of("so far"), ending=session.ending(first.id, FAILED, error=DEAD_END))
    response = await task
    assert (await quiet.scheduler.cancels.get()).id == second.id
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (422, "constraint_dead_end")
        return
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    assert (events[-2]["error"]["code"], events[-2]["error"]["type"]) == ("constraint_dead_end", "invalid_request_error")
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-2]) == "so far"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    assert json.dumps(events).count("[DONE]") == 1
    await quiet.until_idle()
