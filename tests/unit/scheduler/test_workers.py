"""The stream to a worker: it ends when it is told to, whatever arrives at that moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.scheduler.workers import LostWorker, WorkerLink
from tokenloom.worker.v1 import worker_pb2


class _Call:
    """A stream whose messages a test puts in."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.status = grpc.StatusCode.OK

    async def read(self) -> Any:
        return await self.messages.get()

    async def code(self) -> grpc.StatusCode:
        return self.status

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def details(self) -> str:
        return "gone"


def link() -> WorkerLink:
    return WorkerLink("unix:/nowhere", SimpleNamespace(step_patience_us=lambda _: 1e6))  # type: ignore[arg-type]


@pytest.mark.parametrize("turns", range(6))
async def test_a_message_that_arrives_with_the_cancellation_does_not_hide_it(turns: int):
    call, worker = _Call(), link()

    async def read_on() -> None:
        while True:
            await worker._read(call, 60.0)

    task = asyncio.create_task(read_on())
    await asyncio.sleep(0)
    call.messages.put_nowait(worker_pb2.RunResponse())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=1.0)
    task.cancel()
    assert done, "the cancellation was forgotten"


async def test_silence_is_a_loss():
    with pytest.raises(LostWorker, match="silent"):
        await link()._read(_Call(), 0.01)


@pytest.mark.parametrize(("status", "error"), [(grpc.StatusCode.OK, LostWorker), (grpc.StatusCode.UNAVAILABLE, grpc.aio.AioRpcError)])
async def test_a_stream_that_ended_is_a_loss_with_its_reason(status: grpc.StatusCode, error: type[Exception]):
    call = _Call()
    call.status = status
    call.messages.put_nowait(grpc.aio.EOF)
    with pytest.raises(error):
        await link()._read(call, 1.0)


def beat(running_us: int, epoch: int = 1) -> worker_pb2.RunResponse:
    return worker_pb2.RunResponse(heartbeat=worker_pb2.Heartbeat(epoch=epoch, running_step=4, running_us=running_us))


def test_a_step_that_runs_too_long_is_a_loss():
    worker = link()
    worker._dispatch(beat(999_999), 1)
    with pytest.raises(LostWorker, match="step 4"):
        worker._dispatch(beat(1_000_001), 1)


def test_the_answer_to_a_cut_reaches_the_engine():
    heard: list[worker_pb2.Closed] = []
    worker = WorkerLink("unix:/nowhere", SimpleNamespace(worker_closed=lambda _, closed: heard.append(closed)))  # type: ignore[arg-type]
    worker._dispatch(worker_pb2.RunResponse(closed=worker_pb2.Closed(epoch=1, number=5, last_step=7)), 1)
    assert [(closed.number, closed.last_step) for closed in heard] == [(5, 7)]


def test_batches_and_cuts_leave_in_order():
    worker = link()
    worker.send(worker_pb2.StepBatch(number=5, lease_steps=4))
    worker.send_cut(worker_pb2.Cut(number=5, last_step=6))
    assert [worker.outgoing.get_nowait().WhichOneof("kind") for _ in range(2)] == ["batch", "cut"]


def test_a_heartbeat_of_another_epoch_says_nothing():
    worker = link()
    worker._dispatch(beat(5_000_000, epoch=9), 1)
    assert worker.heartbeat.running_step == 0
