"""A core that has raised is never entered again: the process ends at once, and gateways take what is live to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.packing import pack_ids
from services.scheduler import engine, intake, server, sessions
from services.scheduler.core.state import SchedulerState
from services.scheduler.server import run
from tests.support.core import RULES
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params


class Bug(RuntimeError):
    """What is thrown into the core."""


def bug(*_: object, **__: object) -> Any:
    raise Bug("the ledger is out of order")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    """Left without the check that everything has ended: what breaks leaves its requests to the next scheduler."""
    mesh = SchedulerMesh(tmp_path, drain_timeout=600.0)
    mesh.may_break = True
    async with mesh:
        yield mesh
        await mesh.stop()


async def running(mesh: SchedulerMesh) -> SessionClient:
    """A request that runs, held by its worker."""
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 20, params())
    await worker.wait_batches(1)
    return session


async def broken(mesh: SchedulerMesh) -> None:
    await asyncio.wait_for(mesh.process.deposed(), 10)
    assert mesh.engine.broken.is_set()


async def test_an_exception_while_planning_in_a_callback_of_the_loop_ends_the_process(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    session = await running(mesh)
    monkeypatch.setattr(engine, "plan", bug)
    monkeypatch.setattr(engine, "can_dispatch", lambda group: True)
    monkeypatch.setattr(engine.Engine, "_is_due", lambda *_: True)
    await session.submit(2, [2] * 20, params())
    await broken(mesh)


async def test_an_exception_while_planning_when_a_timer_fires_ends_the_process(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    await running(mesh)
    monkeypatch.setattr(engine.Engine, "_dispatch", bug)
    (group,), (pace,) = mesh.state.groups.values(), mesh.engine.shard.paces.values()
    asyncio.get_running_loop().call_later(0.001, mesh.engine._dispatch_later, group, pace)
    await broken(mesh)


async def test_an_exception_while_applying_an_answer_ends_the_process_and_not_the_workers_stream(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch
):
    await running(mesh)
    monkeypatch.setattr(engine, "apply", bug)
    mesh._workers[0].gate.set()
    await broken(mesh)
    assert len(mesh._workers[0].attaches) == 1, "the group was attached anew by a core that cannot be trusted"


async def test_an_exception_while_a_deadline_passes_ends_the_process(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    session = await running(mesh)
    monkeypatch.setattr(SchedulerState, "expire", bug)
    await session.submit(2, [2] * 20, params(), deadline_remaining_us=1000)
    await broken(mesh)


@pytest.mark.parametrize("way", ["a cancel", "a session's end", "a submit", "the tick"])
async def test_an_exception_under_what_a_session_or_the_clock_asks_for_ends_the_process(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch, way: str
):
    session = await running(mesh)
    match way:
        case "a cancel":
            monkeypatch.setattr(SchedulerState, "cancel", bug)
            await session.cancel(1)
        case "a session's end":
            monkeypatch.setattr(SchedulerState, "cancel", bug)
            await session.close()
        case "a submit":
            monkeypatch.setattr(SchedulerState, "accept", bug)
            await session.submit(2, [2], params())
        case _:
            monkeypatch.setattr(engine.Engine, "_end_patience", bug)
    await broken(mesh)


async def test_the_error_is_logged_with_its_traceback_and_with_what_entered_the_core(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    said: list[dict[str, Any]] = []
    monkeypatch.setattr("services.scheduler.shard.log.exception", lambda event, **fields: said.append({"event": event, **fields}))
    session = await running(mesh)
    monkeypatch.setattr(SchedulerState, "cancel", bug)
    await session.cancel(1)
    await broken(mesh)
    assert [entry["entered_by"] for entry in said] == ["cancel"]


async def test_nothing_enters_a_broken_core_and_gateways_lose_their_sessions_without_an_ending(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch
):
    session = await running(mesh)
    with monkeypatch.context() as patch:
        patch.setattr(SchedulerState, "cancel", bug)
        await session.cancel(1)
        await broken(mesh)
    before = (mesh.state.counters.admitted, list(mesh.state.requests))
    await session.submit(2, [2], params())
    await session.cancel(1)
    mesh._workers[0].gate.set()
    # It does not drain, however long it might: a request that its core forgot would never end.
    await asyncio.wait_for(mesh.stop(), 10)
    await session.until(lambda: session.over)
    assert (mesh.state.counters.admitted, list(mesh.state.requests)) == before
    assert all(not frame.endings for frame in session.frames)
    assert session.window.max_outstanding, "the session had begun"


async def test_a_core_that_breaks_while_the_process_drains_does_not_hold_it(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    await running(mesh)
    monkeypatch.setattr(engine, "apply", bug)
    stopping = asyncio.create_task(mesh.stop())
    await mesh.until(lambda: mesh.engine.draining)
    mesh._workers[0].gate.set()
    await asyncio.wait_for(stopping, 10)
    assert mesh.engine.broken.is_set()


async def test_the_next_scheduler_continues_what_the_broken_one_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompt, sampling = [1] * 20, params(seed=5, max_tokens=12)
    first = SchedulerMesh(tmp_path)
    first.may_break = True
    async with first:
        session = await running(first)
        monkeypatch.setattr(engine, "apply", bug)
        first._workers[0].gate.set()
        await broken(first)
        await first.stop()
        await session.until(lambda: session.over)
        monkeypatch.undo()
    async with SchedulerMesh(tmp_path) as second:
        await second.worker()
        resumed = await (await second.session()).ready()
        whole = expected_output(RULES, prompt, sampling)
        await resumed.submit(1, prompt, sampling, attempt=1, output_ids=pack_ids(whole[:3]))
        assert (await resumed.ended(1)).tokens == whole


async def test_the_process_ends_with_an_error_for_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[server.SchedulerProcess] = []

    class Process(server.SchedulerProcess):
        async def start(self) -> None:
            made.append(self)
            await super().start()
            assert self.engine is not None
            monkeypatch.setattr(engine.Engine, "_end_patience", bug)

    monkeypatch.setattr(server, "SchedulerProcess", Process)
    async with SchedulerMesh(tmp_path) as mesh:
        mesh.may_break = True
        await mesh.worker()
        config = mesh.config.model_copy(update={"listen": f"unix:{tmp_path}/second.sock", "drain_timeout": 600.0})
        code = await asyncio.wait_for(run(config, "test", asyncio.Event()), 30)
        mesh._stopped = True
        await mesh.process.stop()
    assert code == 1
    assert made[-1].engine is not None
    assert made[-1].engine.broken.is_set()


async def test_an_answer_that_cannot_be_read_costs_the_workers_stream_alone(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    with monkeypatch.context() as patch:
        patch.setattr(engine.convert, "from_result", bug)
        await session.submit(1, [1] * 20, params())
        await mesh.until(lambda: len(worker.attaches) > 1)
    assert (await session.ended(1)).tokens == expected_output(RULES, [1] * 20, params())
    assert not mesh.engine.broken.is_set()


@pytest.mark.parametrize("error", [Bug("a frame has no end"), None])
async def test_what_breaks_a_session_is_logged_and_a_gateway_that_hangs_up_is_not(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    said: list[Any] = []
    monkeypatch.setattr(sessions.log, "error", lambda event, **fields: said.append(fields.get("exc_info")))
    await mesh.worker()
    session = await (await mesh.session()).ready()
    if error is not None:
        monkeypatch.setattr(intake.Intake, "window", bug)
        await session.until(lambda: session.over)
    else:
        await session.close()
    await mesh.until(lambda: not mesh.engine._clients.of_gateway(77))
    await asyncio.sleep(0)
    assert [type(each) for each in said] == ([Bug] if error else [])
