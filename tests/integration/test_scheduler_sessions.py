"""Gateways' sessions with a real scheduler: who is let in, what a lost session leaves behind, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.errors import ErrorCode
from libs.packing import pack_ids
from libs.rpc import PROTOCOL_VERSION, connect, error_of
from services.scheduler import convert, sessions
from services.scheduler.sessions import GatewaySession, SchedulerServicer
from tests.support.core import RULES
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def test_a_session_hears_from_an_idle_scheduler(mesh: SchedulerMesh):
    session = await mesh.session()
    await session.until(lambda: session.frames)
    heard = len(session.frames)
    await session.until(lambda: len(session.frames) >= heard + 2)
    assert all(frame.HasField("window") for frame in session.frames)


async def refusal(session: SessionClient) -> ErrorCode:
    """Why the session was refused."""
    await session.until(lambda: session.over)
    assert session.error is not None
    return error_of(session.error).code


async def test_the_welcome_says_what_is_served(mesh: SchedulerMesh):
    session = await mesh.session()
    await session.until(lambda: session.frames)
    welcome = session.frames[0].welcome
    assert (welcome.protocol_version, welcome.leader_token, welcome.shard) == (PROTOCOL_VERSION, mesh.engine.fencing_token, 0)
    assert not welcome.HasField("model")
    await mesh.worker()
    await session.ready()
    assert session.model is not None
    assert (session.model.max_model_len, session.model.vocab_size, list(session.model.eos_token_ids)) == (128, 40, [0])
    assert {frame.session for frame in session.frames} == {session.frames[0].session}


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 2])
async def test_a_protocol_that_is_too_old_or_too_new_is_refused(mesh: SchedulerMesh, version: int):
    assert await refusal(await mesh.session(version=version)) is ErrorCode.PROTOCOL_VERSION


async def test_one_release_of_skew_is_served(mesh: SchedulerMesh):
    session = await mesh.session(version=PROTOCOL_VERSION + 1)
    await session.until(lambda: session.frames)
    assert session.error is None


async def test_another_shard_is_refused(mesh: SchedulerMesh):
    assert await refusal(await mesh.session(shard=3)) is ErrorCode.WRONG_SHARD


@pytest.mark.parametrize(
    "first",
    [scheduler_pb2.GatewayFrame(), scheduler_pb2.GatewayFrame(hello=scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION))],
    ids=["no hello", "no instance"],
)
async def test_a_first_frame_without_a_proper_hello_is_refused(mesh: SchedulerMesh, first: scheduler_pb2.GatewayFrame):
    async with connect(mesh.config.listen) as channel:
        call: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_of(caught.value).code is ErrorCode.PROTOCOL_VIOLATION


@pytest.mark.composes("session loss", "cancel")
async def test_a_broken_session_cancels_its_requests_and_frees_their_blocks(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 30, params())
    await session.submit(2, [2] * 30, params())
    await worker.wait_batches(1)
    await session.close()
    await mesh.until(lambda: not mesh.state.requests)
    assert mesh.state.counters.cancelled == 2
    assert await mesh.sample("request_cancelled_total", reason="session_lost") == 2
    worker.gate.set()
    await mesh.settled()
    assert await mesh.sample("gateway_sessions") == 0


async def test_a_newer_session_of_the_same_gateway_ends_the_older(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    old = await (await mesh.session()).ready()
    await old.submit(1, [1], params())
    await worker.wait_batches(1)
    new = await (await mesh.session()).ready()
    await old.until(lambda: old.over)
    assert not mesh.state.requests
    assert old.frames[0].session != new.frames[0].session
    await old_is_deaf(old)
    await new.submit(1, [1], params(), attempt=1)
    worker.gate.set()
    assert (await new.ended(1)).tokens == expected_output(RULES, [1], params())


async def old_is_deaf(old: SessionClient) -> None:
    """What the old stream still says does no harm."""
    with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):
        await old.cancel(1)


@pytest.mark.composes("session loss")
async def test_a_request_of_a_lost_session_goes_on_in_the_next_one_token_by_token(mesh: SchedulerMesh):
    await mesh.worker(step_seconds=0.002)
    old = await (await mesh.session()).ready()
    sampling, prompt = params(seed=9, max_tokens=40), [4] * 20
    await old.submit(1, prompt, sampling)
    await old.until(lambda: len(old.received[1].tokens) >= 7)
    await old.close()
    has = old.received[1].tokens
    new = await (await mesh.session()).ready()
    await new.submit(1, prompt, sampling, output_ids=pack_ids(has), attempt=1)
    assert (await new.ended(1)).tokens == expected_output(RULES, prompt, sampling)


@pytest.mark.composes("several gateways")
async def test_sessions_of_different_gateways_do_not_see_each_other(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    first = await (await mesh.session(1)).ready()
    second = await (await mesh.session(2)).ready()
    await first.submit(1, [1], params(seed=1))
    await second.submit(1, [1], params(seed=2))
    await second.cancel(2)
    worker.gate.set()
    assert (await first.ended(1)).tokens == expected_output(RULES, [1], params(seed=1))
    assert (await second.ended(1)).tokens == expected_output(RULES, [1], params(seed=2))


async def test_the_window_is_shared_among_sessions_and_returns_when_one_goes(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=10) as mesh:
        await mesh.worker()
        first = await (await mesh.session(1)).ready()
        assert first.window.max_outstanding == 10
        second = await (await mesh.session(2)).ready()
        await first.until(lambda: first.window.max_outstanding == 5)
        assert second.window.max_outstanding_tokens == 5 * 128
        await second.close()
        await first.until(lambda: first.window.max_outstanding == 10)


@pytest.mark.composes("several gateways")
async def test_a_gateway_that_does_not_read_stalls_no_other(mesh: SchedulerMesh):
    await mesh.worker()
    async with connect(mesh.config.listen) as channel:
        deaf: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        hello = scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION, gateway_instance=5)
        await deaf.write(scheduler_pb2.GatewayFrame(hello=hello))
        session = await (await mesh.session()).ready()
        submits = [
            scheduler_pb2.Submit(id=number, prompt_ids=pack_ids([1]), sampling=params(max_tokens=100).to_proto()) for number in range(1, 5)
        ]
        await deaf.write(scheduler_pb2.GatewayFrame(submits=submits))
        await session.submit(1, [1], params())
        assert len((await session.ended(1)).tokens) == 20
        await mesh.until(lambda: mesh.state.counters.finished == 5)
        deaf.cancel()


class _StuckContext:
    """A peer that says hello and then takes nothing."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.frames.put_nowait(
            scheduler_pb2.GatewayFrame(hello=scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION, gateway_instance=5))
        )

    async def read(self) -> Any:
        return await self.frames.get()

    async def write(self, frame: scheduler_pb2.SchedulerFrame) -> None:
        await asyncio.Event().wait()


class _Owner:
    """Stands for the engine."""

    def __init__(self) -> None:
        self.closed: list[GatewaySession] = []

    def open_session(self, session: GatewaySession) -> None:
        session.nudge()

    def close_session(self, session: GatewaySession) -> None:
        self.closed.append(session)

    def submit(self, session: GatewaySession, submit: scheduler_pb2.Submit) -> None:
        raise AssertionError("nothing was submitted")

    def cancel(self, session: GatewaySession, cancel: scheduler_pb2.Cancel) -> None:
        raise AssertionError("nothing was cancelled")

    def window(self, session: GatewaySession) -> scheduler_pb2.Window:
        return scheduler_pb2.Window()


async def test_a_peer_that_takes_no_frames_loses_its_session(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "STALL_SECONDS", 0.05)
    owner = _Owner()
    await asyncio.wait_for(SchedulerServicer(owner, 0).Session(None, _StuckContext()), 5)  # type: ignore[arg-type]
    assert [session.gateway for session in owner.closed] == [5]


async def test_endings_arrive_with_the_last_tokens_or_after_them(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    for number in range(1, 9):
        await session.submit(number, [number], params(max_tokens=number))
    for number in range(1, 9):
        got = await session.ended(number)
        assert got.ending is not None
        assert got.ending.completion_tokens == len(got.tokens) == number
        assert got.ending.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_submit_that_breaks_its_reader_is_refused_and_costs_nobody_else_the_session(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch
):
    await mesh.worker()
    session = await (await mesh.session()).ready()

    def broken(submit: scheduler_pb2.Submit, *rest: Any) -> Any:
        if submit.id == 2:
            raise KeyError("a bug")
        return to_request(submit, *rest)

    to_request = convert.to_request
    monkeypatch.setattr(convert, "to_request", broken)
    for number in range(1, 4):
        await session.submit(number, [number], params())
    for number in (1, 3):
        assert (await session.ended(number)).tokens == expected_output(RULES, [number], params())
    ending = (await session.ended(2)).ending
    assert ending is not None
    assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (ErrorCode.INTERNAL, False)
    assert not session.over
