"""Clients that leave, stall or run out of time, at every stage: the scheduler is told, nothing stays behind, nobody else waits."""

from __future__ import annotations

import asyncio
import socket

import pytest

from libs.errors import ErrorCode
from tests.support.gateway_fakes import EOS, FakeScheduler, ids_of, say, silence
from tests.support.gateway_process import events_of, running_gateway, until
from tests.support.raw_http import RawClient
from tokenloom.common.v1 import common_pb2

DISCONNECTED = common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED
SLOW_READER = common_pb2.CANCEL_REASON_SLOW_READER
TIMEOUT = common_pb2.CANCEL_REASON_TIMEOUT
BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHATS = "/v1/chat/completions"


@pytest.fixture
async def gateway(tmp_path):
    """A gateway whose scheduler says only what the test says."""
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


async def test_leaving_while_the_body_is_sent_starts_nothing(gateway):
    async with RawClient(gateway.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.01)
    await until(lambda: not gateway.server.server_state.tasks)
    assert gateway.tokenizer.calls == []
    assert await gateway.metric("tokenloom:http_requests_total", path="/v1/completions", status="499") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_tokenization_cancels_the_call_and_submits_nothing(gateway, stream):
    gateway.tokenizer.gate.clear()
    async with RawClient(gateway.port) as client:
        await client.post(CHATS, {**BODY, "stream": stream})
        await gateway.tokenizer.entered.wait()
    await until(lambda: gateway.tokenizer.cancelled == 1)
    await gateway.until_idle()
    assert gateway.scheduler.submitted.empty()
    assert gateway.scheduler.cancels.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_waiting_for_the_first_token_cancels(gateway, stream):
    async with RawClient(gateway.port) as client:
        await client.post(CHATS, {**BODY, "stream": stream})
        _, submit = await gateway.scheduler.submitted.get()
    cancel = await gateway.scheduler.cancels.get()
    assert (cancel.id, cancel.reason) == (submit.id, DISCONNECTED)
    await gateway.until_idle()
    assert await gateway.metric("tokenloom:request_cancelled_total", model_name="tiny", reason="client_disconnected") == 1


@pytest.mark.composes("cancel", "streaming")
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_tokens_arrive_cancels(gateway, stream):
    async with RawClient(gateway.port) as client:
        await client.post(CHATS, {**BODY, "stream": stream})
        session, submit = await gateway.scheduler.submitted.get()
        session.emit(submit.id, ids_of("some"))
        if stream:
            await client.read_until(b"some")
    assert (await gateway.scheduler.cancels.get()).reason == DISCONNECTED
    await gateway.until_idle()


@pytest.mark.composes("cancel", "prompt list")
async def test_leaving_cancels_every_prompt_of_the_request(gateway):
    async with RawClient(gateway.port) as client:
        await client.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        ids = {(await gateway.scheduler.submitted.get())[1].id for _ in range(3)}
    assert {(await gateway.scheduler.cancels.get()).id for _ in range(3)} == ids
    await gateway.until_idle()


async def test_what_the_scheduler_decided_first_counts_not_the_cancel(gateway):
    gateway.scheduler.answers_cancels = False
    async with RawClient(gateway.port) as client:
        await client.post(CHATS, BODY)
        session, submit = await gateway.scheduler.submitted.get()
    await gateway.scheduler.cancels.get()
    assert len(gateway.mesh.book) == 1, "a tombstone until the scheduler has spoken"
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    await gateway.until_idle()
    assert await gateway.metric("tokenloom:request_success_total", model_name="tiny", finished_reason="stop") == 1


@pytest.mark.composes("cancel", "streaming")
async def test_a_slow_reader_is_cancelled_and_cut_and_stalls_nobody(tmp_path):
    """The reader takes nothing: kernel buffers fill, then uvicorn's, then writes stop."""
    async with running_gateway(tmp_path, FakeScheduler(silence), slow_reader_timeout=0.3) as gateway:
        for listening in gateway.server.servers:
            for listener in listening.sockets:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        async with RawClient(gateway.port) as client:
            await client.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 500})
            session, submit = await gateway.scheduler.submitted.get()
            flood = asyncio.create_task(_flood(session, submit))
            gateway.scheduler.behaviour = say("hello")
            for _ in range(10):
                assert (await gateway.chat()).status_code == 200
            assert (await gateway.scheduler.cancels.get()).reason == SLOW_READER
            flood.cancel()
            await gateway.until_idle()
            assert b"[DONE]" not in await client.read_to_end()
        assert await gateway.metric("tokenloom:request_cancelled_total", model_name="tiny", reason="slow_reader") == 1
        assert not gateway.server.server_state.connections or all(
            connection.transport.get_write_buffer_size() == 0 for connection in gateway.server.server_state.connections
        )


async def _flood(session, submit) -> None:
    """Chunks far faster than anyone reads; the text is made long by characters that JSON escapes."""
    for _ in range(20_000):
        session.emit(submit.id, [1] * 50)
        await asyncio.sleep(0)


async def test_a_reader_that_is_only_late_gets_everything_in_fewer_chunks(tmp_path):
    text = "abcdefghij" * 40
    async with running_gateway(tmp_path, FakeScheduler(say(text))) as gateway, RawClient(gateway.port) as client:
        await client.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 500})
        await until(lambda: not gateway.mesh.book and gateway.scheduler.sessions[0].submits)
        received = await client.read_until(b"[DONE]")
        assert received.count(b'"finish_reason":"stop"') == 1


async def test_a_timeout_travels_to_the_scheduler_as_time_left(gateway):
    task = asyncio.create_task(gateway.chat(timeout=7))
    session, submit = await gateway.scheduler.submitted.get()
    assert 6_000_000 < submit.deadline_remaining_us <= 7_000_000
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).status_code == 200


async def test_the_servers_limit_bounds_what_a_client_asks_for(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(), request_timeout=5) as gateway:
        await gateway.chat(timeout=100)
        await gateway.chat()
        await gateway.chat(timeout=2)
        limits = [(await gateway.scheduler.submitted.get())[1].deadline_remaining_us for _ in range(3)]
        assert [round(limit / 1e6) for limit in limits] == [5, 5, 2]


async def test_a_timeout_during_tokenization_is_a_504(gateway):
    gateway.tokenizer.gate.clear()
    response = await gateway.chat(timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.scheduler.submitted.empty()
    gateway.tokenizer.gate.set()
    await gateway.until_idle()


async def test_a_timeout_that_the_scheduler_misses_is_kept_by_the_gateway(gateway):
    response = await gateway.chat(timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (await gateway.scheduler.cancels.get()).reason == TIMEOUT


@pytest.mark.composes("deadline", "streaming")
async def test_a_timeout_in_the_middle_of_a_stream_is_an_event(gateway):
    task = asyncio.create_task(gateway.chat(timeout=0.3, stream=True))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, ids_of("part"))
    events = events_of((await task).text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "deadline_exceeded"


async def test_a_scheduler_that_never_answers_a_cancel_does_not_hold_the_client(gateway, monkeypatch):
    monkeypatch.setattr("services.gateway.generate.ENDING_PATIENCE", 0.05)
    monkeypatch.setattr("services.gateway.generate.TOMBSTONE_PATIENCE", 0.1)
    gateway.scheduler.answers_cancels = False
    response = await gateway.chat(timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: not gateway.mesh.open)
    assert gateway.mesh.admission.sequences == 1, "its place is taken as long as the scheduler may be working on it"


async def test_clients_that_pipeline_are_served_in_order(tmp_path):
    async with running_gateway(tmp_path) as gateway, RawClient(gateway.port) as client:
        await client.post("/v1/completions", {"prompt": "a"}, x_request_id="first")
        await client.post("/v1/completions", {"prompt": "b"}, x_request_id="second")
        await client.read_until(b"cmpl-second")
        assert client.received.index(b"cmpl-first") < client.received.index(b"cmpl-second")


@pytest.mark.composes("cancel", "streaming")
async def test_many_clients_of_which_a_third_leaves(tmp_path):
    text = "x" * 30

    async def slowly(session, submit):
        for index, token in enumerate(ids_of(text)):
            await asyncio.sleep(0.002)
            if index == len(text) - 1:
                session.sent[submit.id] = len(text)
            session.emit(submit.id, [token], first=index, ending=session.ending(submit.id) if index == len(text) - 1 else None)

    async with running_gateway(tmp_path, FakeScheduler(slowly)) as gateway:

        async def client(number: int) -> bool:
            async with RawClient(gateway.port, receive_buffer=65536) as raw:
                await raw.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 100})
                if number % 3 == 0:
                    await raw.read_until(b"x")
                    return False
                return (await raw.read_until(b"[DONE]")).count(b'"finish_reason":"stop"') == 1

        outcomes = await asyncio.gather(*(client(number) for number in range(24)))
        assert outcomes == [number % 3 != 0 for number in range(24)]
        await gateway.until_idle()
        assert len(gateway.mesh.book) == 0
        failed = f'reason="{ErrorCode.INTERNAL.spec.label}"'
        lines = [line for line in (await gateway.client.get("/metrics")).text.splitlines() if "_total{" in line and failed in line]
        assert lines
        assert all(line.endswith(" 0.0") for line in lines), lines
