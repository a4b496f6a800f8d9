"""The model under a running scheduler is exchanged, or its one worker comes back on another kind of machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.scheduler import server
from tests.support.gateway_session import SessionClient
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SchedulerMesh]:
    monkeypatch.setattr(server, "_MISFIT_SECONDS", 0.05)
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def serving_one(mesh: SchedulerMesh) -> SessionClient:
    """A request runs, then its worker is gone."""
    worker = await mesh.worker(gate=asyncio.Event())
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params())
    await worker.wait_batches(1)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    return session


async def ends(mesh: SchedulerMesh) -> None:
    await asyncio.wait_for(mesh.process.deposed(), 20)


async def test_a_scheduler_ends_when_tokenizers_and_workers_serve_another_model(mesh: SchedulerMesh):
    session = await serving_one(mesh)
    mesh.tokenizer.fingerprint = "another"
    await mesh.worker(fingerprint="another")
    await ends(mesh)
    ended = await session.ended(1)
    assert ended.ending.reason == common_pb2.FINISH_REASON_FAILED, "its token ids are the old model's"
    assert "exchanged" in ended.ending.error.message


async def test_a_scheduler_that_started_with_the_old_tokenizers_table_ends_too(mesh: SchedulerMesh):
    mesh.tokenizer.fingerprint = "another"
    await mesh.worker(fingerprint="another")
    await ends(mesh)
    assert mesh.engine.state is None


async def test_a_worker_that_fits_no_tokenizer_does_not_end_the_scheduler(mesh: SchedulerMesh):
    worker = await mesh.worker(fingerprint="another")
    await worker.wait_attaches(4)  # looked at meanwhile, more than once
    assert not mesh.engine.superseded.is_set()
    worker.fingerprint = "table"
    await mesh.until(lambda: mesh.engine.state is not None)
    assert mesh.engine.shard.misfit is None


async def test_a_request_is_handed_on_when_the_only_worker_comes_back_with_other_numerics(mesh: SchedulerMesh):
    session = await serving_one(mesh)
    await mesh.worker(numerics="another")
    await ends(mesh)
    await mesh.stop()
    ended = await session.ended(1)
    assert ended.ending.cancel_reason == common_pb2.CANCEL_REASON_SHUTDOWN, "which gateways take for a hand-over"


async def test_a_worker_of_another_kind_beside_one_that_serves_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_MISFIT_SECONDS", 0.05)
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        await mesh.worker(0)
        await (await mesh.session()).ready()
        other = await mesh.worker(1, numerics="another")
        await other.wait_attaches(3)
        assert mesh.engine.shard.misfit is None
        assert not mesh.engine.superseded.is_set()
