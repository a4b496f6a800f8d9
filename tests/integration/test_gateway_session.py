"""The session with the scheduler breaks, in every way: requests go on, each token reaches the client once; or they fail in time."""

from __future__ import annotations

import asyncio

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from tests.support.gateway_fakes import CANCELLED, EOS, FAILED, FakeScheduler, FakeTokenizer, facts, ids_of, say, silence
from tests.support.gateway_process import events_of, running_gateway, until
from tests.support.raw_http import RawClient
from tokenloom.common.v1 import common_pb2

TEXT = "a request outlives the death of its scheduler"


@pytest.fixture
async def gateway(tmp_path):
    """A gateway whose scheduler says only what the test says."""
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


def dies_after(tokens: int, deaths: int):
    """Answers TEXT, but ends the session after so many tokens, so many times."""
    left = deaths

    async def behaviour(session, submit):
        nonlocal left
        known = len(unpack_ids(submit.output_ids))
        if left and known == (deaths - left) * tokens:
            left -= 1
            session.emit(submit.id, ids_of(TEXT)[known : known + tokens])
            await asyncio.sleep(0.01)
            session.close()
        else:
            await say(TEXT)(session, submit)

    return behaviour


async def test_the_gateway_introduces_itself(gateway):
    hello = gateway.scheduler.session.hello
    assert (hello.protocol_version, hello.name, hello.shard) == (1, "gateway-test", 0)
    assert hello.gateway_instance == gateway.mesh.session.instance != 0


@pytest.mark.composes("session loss", "streaming", "seed")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_session_is_a_pause_and_every_token_comes_once(tmp_path, stream):
    async with running_gateway(tmp_path, FakeScheduler(dies_after(5, 3))) as gateway:
        response = await gateway.complete("a", stream=stream, max_tokens=100, seed=7)
        if stream:
            found = "".join(event["choices"][0]["text"] for event in events_of(response.text)[:-1])
        else:
            found = response.json()["choices"][0]["text"]
        assert found == TEXT
        submits = [gateway.scheduler.submitted.get_nowait()[1] for _ in range(4)]
        assert [submit.attempt for submit in submits] == [0, 1, 2, 3]
        assert [len(unpack_ids(submit.output_ids)) for submit in submits] == [0, 5, 10, 15]
        assert len({submit.id for submit in submits}) == 1
        assert {submit.sampling.seed for submit in submits} == {7}
        assert len({session.hello.gateway_instance for session in gateway.scheduler.sessions}) == 1
        assert await gateway.metric("tokenloom:gateway_resumed_requests_total") == 3
        await gateway.until_idle()


@pytest.mark.composes("session loss", "seed")
async def test_a_drawn_seed_survives_the_session(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(dies_after(5, 1))) as gateway:
        await gateway.complete("a", max_tokens=100)
        seeds = {gateway.scheduler.submitted.get_nowait()[1].sampling.seed for _ in range(2)}
        assert len(seeds) == 1


async def test_a_gap_in_the_tokens_breaks_the_session_and_the_text_stays_whole(gateway):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, ids_of("one"))
    session.emit(submit.id, ids_of("three"), first=7)
    session, submit = await gateway.scheduler.submitted.get()
    assert (submit.attempt, unpack_ids(submit.output_ids)) == (1, ids_of("one"))
    session.emit(submit.id, [*ids_of(" two"), EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "one two"
    assert len(gateway.scheduler.sessions) == 2


async def test_tokens_sent_twice_are_shown_once(gateway):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, ids_of("abc"))
    session.emit(submit.id, ids_of("bcd"), first=1)
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "abcd"


async def test_frames_of_another_session_are_ignored(gateway):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    foreign = session.delta(submit.id, ids_of("evil"))
    foreign.session = 12345
    session.put(foreign)
    session.sent[submit.id] = 0
    session.emit(submit.id, ids_of("good"))
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "good"
    assert await gateway.metric("tokenloom:gateway_stray_messages_total", kind="frame") == 1


async def test_a_malformed_frame_breaks_the_session(gateway):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    frame = session.frame()
    frame.ids.append(submit.id)
    frame.token_ids = pack_ids([1])
    session.put(frame)
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).status_code == 200


async def test_a_scheduler_that_shuts_down_hands_its_requests_to_the_next(gateway):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, ids_of("be"))
    shutdown = session.ending(submit.id, CANCELLED, cancel_reason=common_pb2.CANCEL_REASON_SHUTDOWN)
    session.emit(submit.id, [], ending=shutdown)
    session.close()
    session, submit = await gateway.scheduler.submitted.get()
    assert unpack_ids(submit.output_ids) == ids_of("be")
    session.emit(submit.id, [*ids_of("gun"), EOS], ending=None)
    session.emit(submit.id, [], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "begun"


async def test_requests_wait_for_a_scheduler_only_so_long(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(silence), resume_timeout=0.3) as gateway:
        whole = asyncio.create_task(gateway.complete("a"))
        await gateway.scheduler.submitted.get()
        async with RawClient(gateway.port) as client:
            await client.post("/v1/completions", {"prompt": "a", "stream": True})
            session, submit = await gateway.scheduler.submitted.get()
            session.emit(submit.id, ids_of("some"))
            await client.read_until(b"some")
            gateway.scheduler.accepts_sessions = False
            session.close()
            assert b'"code":"session_lost"' in await client.read_until(b"[DONE]")
        response = await whole
        assert (response.status_code, response.json()["error"]["code"], response.headers["retry-after"]) == (503, "session_lost", "1")
        await gateway.until_idle()


async def test_without_a_session_new_requests_get_a_503_and_later_ones_are_served(tmp_path):
    scheduler = FakeScheduler()
    scheduler.accepts_sessions = False
    async with running_gateway(tmp_path, scheduler, wait_ready=False) as gateway:
        await until(lambda: "not now" in gateway.mesh.session.window.not_ready_reason)
        response = await gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "scheduler_unavailable")
        assert "not now" not in response.json()["error"]["message"], "what gRPC says is for the log"
        scheduler.accepts_sessions = True
        await until(lambda: not gateway.mesh.obstacles())
        assert (await gateway.chat()).status_code == 200


async def test_a_new_request_waits_for_the_scheduler_to_come_back(tmp_path):
    scheduler = FakeScheduler()
    async with running_gateway(tmp_path, scheduler, scheduler_patience=60) as gateway:
        scheduler.accepts_sessions = False
        scheduler.session.close()
        await until(lambda: not gateway.mesh.session.up)
        asked = asyncio.create_task(gateway.chat())
        await until(lambda: gateway.mesh.waiting_room.waiting == 1)
        scheduler.accepts_sessions = True
        assert (await asked).status_code == 200
        await gateway.until_idle()


async def test_what_is_no_request_is_told_so_without_waiting_for_the_scheduler(tmp_path):
    scheduler = FakeScheduler()
    scheduler.accepts_sessions = False
    async with running_gateway(tmp_path, scheduler, wait_ready=False, scheduler_patience=60) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json={"messages": 3})).status_code == 400


async def test_a_client_may_leave_while_its_new_request_waits_for_the_scheduler(tmp_path):
    scheduler = FakeScheduler()
    scheduler.accepts_sessions = False
    async with running_gateway(tmp_path, scheduler, wait_ready=False, scheduler_patience=60) as gateway:
        async with RawClient(gateway.port) as client:
            await client.post("/v1/completions", {"prompt": "a"})
            await until(lambda: gateway.mesh.waiting_room.waiting == 1)
        await gateway.until_idle()
        assert gateway.mesh.waiting_room.waiting == 0


async def test_a_drain_ends_the_wait_for_the_scheduler(tmp_path):
    scheduler = FakeScheduler()
    scheduler.accepts_sessions = False
    async with running_gateway(tmp_path, scheduler, wait_ready=False, scheduler_patience=60) as gateway:
        asked = asyncio.create_task(gateway.chat())
        await until(lambda: gateway.mesh.waiting_room.waiting == 1)
        await gateway.mesh.drain()
        response = await asked
        assert (response.status_code, response.json()["error"]["code"], response.headers["x-tokenloom-not-begun"]) == (503, "draining", "1")


@pytest.mark.parametrize("changed", ["model", "tokenizer"])
async def test_what_waits_while_the_model_is_exchanged_fails_and_is_not_given_to_the_new_model(gateway, changed):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, ids_of("one"))
    setattr(gateway.scheduler.model.fingerprints, changed, "e" * 64)
    session.close()
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (503, "session_lost")
    assert "exchanged" in response.json()["error"]["message"]
    assert gateway.scheduler.submitted.empty()


async def test_what_was_encoded_for_the_model_before_is_not_submitted(gateway):
    gateway.tokenizer.gate.clear()
    asked = asyncio.create_task(gateway.complete("a"))
    await until(lambda: bool(gateway.tokenizer.calls))
    gateway.mesh.session.facts.fingerprints.tokenizer = "e" * 64
    gateway.tokenizer.gate.set()
    response = await asked
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert gateway.scheduler.submitted.empty()


async def test_what_a_leaving_scheduler_refuses_goes_to_the_one_after_it(gateway):
    task = asyncio.create_task(gateway.complete("a"))
    session, submit = await gateway.scheduler.submitted.get()
    error = TokenloomError(ErrorCode.DRAINING, "the scheduler is shutting down").to_proto()
    session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=error, was_accepted=False))
    session, submit = await gateway.scheduler.submitted.get()
    assert submit.attempt == 1
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).status_code == 200


@pytest.mark.composes("session loss", "cancel")
async def test_a_client_may_leave_while_its_request_waits_for_a_session(gateway):
    async with RawClient(gateway.port) as client:
        await client.post("/v1/completions", {"prompt": "a"})
        session, _ = await gateway.scheduler.submitted.get()
        gateway.scheduler.accepts_sessions = False
        session.close()
        await until(lambda: gateway.mesh.book.waiting == 1)
    await gateway.until_idle()
    gateway.scheduler.accepts_sessions = True
    await until(lambda: gateway.mesh.session.up)
    assert gateway.scheduler.submitted.empty()


@pytest.mark.composes("session loss", "deadline")
async def test_a_timeout_holds_while_a_request_waits_for_a_session(gateway):
    task = asyncio.create_task(gateway.complete("a", timeout=0.3))
    session, _ = await gateway.scheduler.submitted.get()
    gateway.scheduler.accepts_sessions = False
    session.close()
    assert (await task).status_code == 504


async def test_a_resumed_request_that_is_refused_for_want_of_workers_tries_again(gateway):
    task = asyncio.create_task(gateway.complete("a"))
    session, _ = await gateway.scheduler.submitted.get()
    session.close()
    session, submit = await gateway.scheduler.submitted.get()
    error = TokenloomError(ErrorCode.NO_WORKER, "not yet").to_proto()
    session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=error, was_accepted=False))
    session, submit = await gateway.scheduler.submitted.get()
    assert submit.attempt == 2
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).status_code == 200


async def test_ready_tells_every_reason(tmp_path):
    scheduler, tokenizer = FakeScheduler(), FakeTokenizer()
    scheduler.model = None
    async with running_gateway(
        tmp_path, scheduler, tokenizer, wait_ready=False, tokenizer_address=[f"unix:{tmp_path}/none.sock"]
    ) as gateway:
        await until(lambda: gateway.mesh.session.up)
        response = await gateway.client.get("/ready")
        assert response.status_code == 503
        assert [reason["code"] for reason in response.json()["reasons"]] == ["no_worker", "tokenizer_unavailable"]
        assert (await gateway.chat()).status_code == 503
        assert (await gateway.client.get("/v1/models/tiny")).json()["max_model_len"] is None
        assert (await gateway.client.get("/health")).status_code == 200


async def test_the_model_may_become_known_after_the_session(tmp_path):
    scheduler = FakeScheduler()
    scheduler.model = None
    async with running_gateway(tmp_path, scheduler, wait_ready=False) as gateway:
        await until(lambda: gateway.mesh.session.up and gateway.mesh.tokenizers.table is not None)
        assert gateway.mesh.obstacles()
        frame = scheduler.session.frame()
        frame.welcome.model.CopyFrom(facts())
        scheduler.session.put(frame)
        await until(lambda: not gateway.mesh.obstacles())
        assert (await gateway.chat()).status_code == 200


async def test_tokenizers_that_are_not_those_of_the_model_are_not_ready_until_they_are(tmp_path):
    scheduler, tokenizer = FakeScheduler(), FakeTokenizer("a" * 64)
    async with running_gateway(tmp_path, scheduler, tokenizer, wait_ready=False) as gateway:
        await until(lambda: gateway.mesh.session.up and gateway.mesh.tokenizers.table is not None)
        reasons = (await gateway.client.get("/ready")).json()["reasons"]
        assert ["aaaaaaaaaaaa" in reason["message"] and "ffffffffffff" in reason["message"] for reason in reasons] == [True]
        tokenizer.table = FakeTokenizer().table
        await until(lambda: not gateway.mesh.obstacles())
        assert (await gateway.client.get("/ready")).status_code == 200


async def test_a_scheduler_that_falls_silent_is_lost_and_its_requests_go_on(gateway, monkeypatch):
    monkeypatch.setattr("services.gateway.session.STALL_TIMEOUT", 0.5)
    gateway.scheduler.frozen = True
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    frozen, submit = await gateway.scheduler.submitted.get()
    frozen.emit(submit.id, ids_of("one"))  # heard with the old patience; what follows is not
    session, submit = await gateway.scheduler.submitted.get()
    assert session is not frozen
    assert (submit.attempt, unpack_ids(submit.output_ids)) == (1, ids_of("one"))
    session.emit(submit.id, [EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "one"


async def test_without_any_tokenizer_the_gateway_is_not_ready_and_tells_no_client_of_its_sockets(gateway):
    await gateway.tokenizer.stop()
    await until(lambda: gateway.mesh.obstacles())
    assert [reason["code"] for reason in (await gateway.client.get("/ready")).json()["reasons"]] == ["tokenizer_unavailable"]
    response = await gateway.chat()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "unix:" not in response.text


async def test_a_start_before_the_others_warns_of_nothing_but_a_loss_afterwards_does(tmp_path, monkeypatch):
    warned = []
    for module in ("session", "tokenizer_client"):
        monkeypatch.setattr(f"services.gateway.{module}._log.warning", lambda event, **_fields: warned.append(event))
    addresses = {"scheduler_address": f"unix:{tmp_path}/later-s.sock", "tokenizer_address": [f"unix:{tmp_path}/later-t.sock"]}
    scheduler, tokenizer = FakeScheduler(), FakeTokenizer()
    async with running_gateway(tmp_path, wait_ready=False, **addresses) as gateway:
        await until(lambda: "failed to connect" in gateway.mesh.session.window.not_ready_reason)
        await scheduler.start(addresses["scheduler_address"])
        await tokenizer.start(addresses["tokenizer_address"][0])
        await until(lambda: not gateway.mesh.obstacles())
        assert not warned
        scheduler.session.close()
        await until(lambda: bool(warned))
        assert warned == ["no session with the scheduler"]
        await scheduler.stop()
        await tokenizer.stop()


async def test_a_fault_while_a_frame_is_read_costs_the_session_and_no_request(gateway, monkeypatch):
    task = asyncio.create_task(gateway.complete("a", max_tokens=100))
    session, submit = await gateway.scheduler.submitted.get()
    with monkeypatch.context() as patch:
        patch.setattr(gateway.mesh.book, "receive", lambda *_: 1 // 0)
        session.emit(submit.id, ids_of("one"))
        await until(lambda: not gateway.mesh.session.up)
    session, submit = await gateway.scheduler.submitted.get()
    assert submit.attempt == 1
    session.emit(submit.id, [*ids_of("two"), EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))
    assert (await task).json()["choices"][0]["text"] == "two"
