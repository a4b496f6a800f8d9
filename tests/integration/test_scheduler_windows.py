"""Windows over real sessions: they follow demand, and the scheduler's own bound is the truth."""

from __future__ import annotations

from pathlib import Path

from libs.errors import ErrorCode
from tests.support.gateway_session import SessionClient
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.scheduler.v1 import scheduler_pb2

BOUND = 40


async def fill(session: SessionClient, first: int, count: int) -> list[int]:
    """Submits so many requests that stay live."""
    numbers = list(range(first, first + count))
    for number in numbers:
        await session.submit(number, [1], params(max_tokens=2))
    await session.until(lambda: all(session.received[number].accepted for number in numbers))
    return numbers


async def test_what_an_idle_session_does_not_use_goes_to_a_busy_one_and_comes_back(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=BOUND) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        busy, idle = await (await mesh.session(1)).ready(), await (await mesh.session(2)).ready()
        await busy.until(lambda: busy.window.max_outstanding == BOUND // 2)
        numbers = await fill(busy, 1, BOUND // 2)
        await busy.until(lambda: busy.window.max_outstanding >= 30)
        await idle.until(lambda: 5 <= idle.window.max_outstanding <= BOUND - 30)  # told without having said anything
        more = await fill(busy, 100, 10)
        worker.gate.set()
        for number in (*numbers, *more):
            assert (await busy.ended(number)).ending is not None
        await idle.until(lambda: idle.window.max_outstanding == BOUND // 2)  # nobody is busy any more
        await busy.until(lambda: busy.window.max_outstanding == BOUND // 2)


async def test_two_busy_sessions_have_equal_windows_whoever_came_first(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=BOUND) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        first = await (await mesh.session(1)).ready()
        await fill(first, 1, 20)
        second = await (await mesh.session(2)).ready()
        await fill(second, 1, 5)
        await second.until(lambda: second.window.max_outstanding >= 10)
        await fill(second, 10, 15)
        await second.until(lambda: second.window.max_outstanding == BOUND // 2)
        await first.until(lambda: first.window.max_outstanding == BOUND // 2)
        worker.gate.set()


async def test_a_lost_sessions_window_returns_at_once(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=BOUND, max_queue_tokens=4000) as mesh:
        await mesh.worker()
        first, second = await (await mesh.session(1)).ready(), await (await mesh.session(2)).ready()
        await first.until(lambda: (first.window.max_outstanding, first.window.max_outstanding_tokens) == (BOUND // 2, 2000))
        await second.close()
        await first.until(lambda: (first.window.max_outstanding, first.window.max_outstanding_tokens) == (BOUND, 4000))


async def test_beyond_the_schedulers_own_bound_a_submit_is_a_429_whatever_the_window_said(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=4) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await fill(session, 1, 4)
        await session.submit(5, [1], params())
        ending = (await session.ended(5)).ending
        assert ending is not None
        assert ErrorCode.from_number(ending.error.code) is ErrorCode.QUEUE_FULL
        assert ending.error.retry_after_ms
        assert not ending.was_accepted
        worker.gate.set()


async def test_every_frame_restates_the_window(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=BOUND) as mesh:
        await mesh.worker()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params())
        await session.ended(1)
        assert all(frame.HasField("window") for frame in session.frames)
        assert session.window == scheduler_pb2.Window(max_outstanding=BOUND, max_outstanding_tokens=BOUND * 128, ready=True)
