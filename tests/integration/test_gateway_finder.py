"""A gateway that finds its scheduler in the store, and follows it to another address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from libs.clock import SystemClock
from libs.store.registry import Member, schedulers
from libs.store.sqlite import SqliteStore
from libs.telemetry.tracing import Tracer
from services.gateway.config import GatewayConfig
from services.gateway.finder import SchedulerFinder
from services.gateway.mesh import Mesh
from tests.support.gateway_fakes import FakeScheduler
from tests.support.gateway_process import until


async def register(store: SqliteStore, address: str, token: int, ttl: float = 60) -> None:
    await store.put(schedulers(0) + address, Member(address, "s", token).to_json(), ttl_seconds=ttl)


@asynccontextmanager
async def gateway(folder: Path, **config: str) -> AsyncIterator[Mesh]:
    settings = GatewayConfig(store=str(folder / "store.db"), tokenizer_address=[f"unix:{folder}/none.sock"], **config)
    mesh = Mesh(settings, instance="g", clock=SystemClock(), tracer=Tracer("gateway", "test"))
    mesh.start()
    try:
        yield mesh
    finally:
        await mesh.close()


async def test_the_leader_is_the_one_with_the_highest_token_and_the_last_known_one_while_the_store_is_away(tmp_path: Path):
    store = SqliteStore(tmp_path / "later" / "store.db")
    finder = SchedulerFinder("", store)
    assert await finder.find() == "", "nobody has ever known"
    (tmp_path / "later").mkdir()
    await register(store, "10.0.0.9:1", 3)
    await register(store, "10.0.0.1:1", 12)
    assert await finder.find() == "10.0.0.1:1"
    await store.delete(schedulers(0) + "10.0.0.1:1")
    assert await finder.find() == "10.0.0.9:1"
    await store.delete(schedulers(0) + "10.0.0.9:1")
    assert await finder.find() == "10.0.0.9:1", "an empty registry says nothing"


async def test_a_gateway_waits_for_a_scheduler_to_register_and_follows_it(tmp_path: Path):
    store, first, second = SqliteStore(tmp_path / "store.db"), FakeScheduler(), FakeScheduler()
    addresses = [await first.start(f"unix:{tmp_path}/1.sock"), await second.start(f"unix:{tmp_path}/2.sock")]
    async with gateway(tmp_path) as mesh:
        await until(lambda: "no scheduler has registered" in mesh.session.window.not_ready_reason, timeout=30)
        await register(store, addresses[0], 1)
        await asyncio.wait_for(first.session_opened.wait(), 30)
        await until(lambda: mesh.session.up, timeout=30)
        await register(store, addresses[1], 2)
        await first.stop()
        await asyncio.wait_for(second.session_opened.wait(), 30)
        await until(lambda: mesh.session.up, timeout=30)
    await second.stop()


async def test_a_fixed_address_wins(tmp_path: Path):
    store, fixed, other = SqliteStore(tmp_path / "store.db"), FakeScheduler(), FakeScheduler()
    addresses = [await fixed.start(f"unix:{tmp_path}/1.sock"), await other.start(f"unix:{tmp_path}/2.sock")]
    await register(store, addresses[1], 9)
    async with gateway(tmp_path, scheduler_address=addresses[0]) as mesh:
        await until(lambda: mesh.session.up, timeout=30)
        assert not other.sessions
    await fixed.stop()
    await other.stop()
