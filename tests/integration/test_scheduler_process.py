"""The scheduler as a process: ready when it can serve, found by its tools, gone without losing an ending, and free of torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.errors import ErrorCode
from libs.rpc import connect
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import SchedulerProcess, run
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "tokenloom.scheduler.v1.SchedulerService"
REPOSITORY = Path(__file__).parents[2]


async def follow_health(address: str, wanted: Any, service: str = "") -> None:
    """Watches the health of the service until it is as wanted."""
    async with connect(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        async for answer in watch:
            if answer.status == wanted:
                watch.cancel()
                return


async def test_it_is_ready_while_a_worker_is_attached(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        async with connect(mesh.config.listen) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == NOT_SERVING
        worker = await mesh.worker()
        await follow_health(mesh.config.listen, SERVING, SERVICE)
        await worker.stop()
        await follow_health(mesh.config.listen, NOT_SERVING)


async def test_reflection_lists_the_service(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh, connect(mesh.config.listen) as channel:
        call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_stopping_refuses_what_comes_and_finishes_what_runs(tmp_path: Path):
    async with SchedulerMesh(tmp_path, drain_timeout=20.0) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params())
        await worker.wait_batches(1)
        stopping = asyncio.create_task(mesh.stop())
        await session.until(lambda: not session.window.ready)
        assert session.window.not_ready_reason == "the scheduler is shutting down"
        await session.submit(2, [2], params())
        ending = (await session.ended(2)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (ErrorCode.DRAINING, False)
        await follow_health(mesh.config.listen, NOT_SERVING)
        assert not stopping.done()
        worker.gate.set()
        got = await session.ended(1)
        assert got.ending is not None
        assert (got.ending.reason, len(got.tokens)) == (common_pb2.FINISH_REASON_LENGTH, 20)
        await stopping


async def test_what_does_not_finish_in_time_is_told_so(tmp_path: Path):
    async with SchedulerMesh(tmp_path, drain_timeout=0.05) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params())
        await worker.wait_batches(1)
        await mesh.stop()
        ending = (await session.ended(1)).ending
        assert ending is not None
        assert (ending.reason, ending.cancel_reason) == (common_pb2.FINISH_REASON_CANCELLED, common_pb2.CANCEL_REASON_SHUTDOWN)


@pytest.mark.parametrize("missing", ["tokenizer_address", "worker_address"])
async def test_a_configuration_that_can_never_serve_ends_the_process(tmp_path: Path, missing: str):
    values: dict[str, Any] = {"tokenizer_address": ["unix:/nowhere"], "worker_address": ["unix:/nowhere"], missing: []}
    config = SchedulerConfig(listen=f"unix:{tmp_path}/s.sock", **values)
    assert await asyncio.wait_for(run(config, "test", asyncio.Event()), 10) == 1


async def test_it_stops_while_it_still_waits_for_a_tokenizer(tmp_path: Path):
    config = SchedulerConfig(
        listen=f"unix:{tmp_path}/s.sock", tokenizer_address=[f"unix:{tmp_path}/no.sock"], worker_address=["unix:/nowhere"]
    )
    stop = asyncio.Event()
    running = asyncio.create_task(run(config, "test", stop))
    await asyncio.sleep(0)
    stop.set()
    assert await asyncio.wait_for(running, 10) == 0


async def test_an_address_that_is_taken_ends_the_start(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        config = mesh.config.model_copy(update={"listen": "nonsense://"})
        assert await asyncio.wait_for(run(config, "test", asyncio.Event()), 10) == 1


async def test_two_schedulers_of_one_store_have_different_tokens(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    store = str(tmp_path / "store.db")
    async with SchedulerMesh(tmp_path / "a", store=store) as first, SchedulerMesh(tmp_path / "b", store=store) as second:
        assert first.engine.fencing_token < second.engine.fencing_token


async def test_the_process_hears_of_every_ledger_that_is_made(tmp_path: Path):
    made: list[int] = []
    mesh = SchedulerMesh(tmp_path)
    mesh.process = SchedulerProcess(mesh.config, mesh.process.tracer, lambda: made.append(len(mesh.state.groups)))
    async with mesh:
        worker = await mesh.worker()
        await (await mesh.session()).ready()
        await worker.stop()
        await mesh.until(lambda: not mesh.state.groups)
        await mesh.worker()
        await mesh.until(lambda: mesh.state.groups)
    assert made == [1, 1]


def test_what_is_alive_at_an_attach_is_out_of_the_collectors_sight():
    code = (
        "import gc; from services.scheduler.core.ledger import BlockLedger; from services.scheduler.server import _freeze_heap; "
        "ledger = BlockLedger(1000); _freeze_heap(); "
        "print(gc.get_freeze_count() > 1000, any(each is ledger._blocks[0] for each in gc.get_objects()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_torch_is_not_imported():
    code = "import sys, services.scheduler.__main__; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_session_that_is_open_when_the_process_stops_ends_without_an_error_of_its_own(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker()
        session = await (await mesh.session()).ready()
        await mesh.stop()
        await session.until(lambda: session.over)
        assert session.error is None or session.error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
