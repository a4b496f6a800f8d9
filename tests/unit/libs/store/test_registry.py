"""Entries that are renewed while their owner lives, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.store import registry
from libs.store.registry import WORKERS, Member, keep_registered, members, schedulers
from libs.store.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    monkeypatch.setattr(registry, "RENEW_SECONDS", 0.01)
    return SqliteStore(tmp_path / "later" / "store.db")


async def registered(store: SqliteStore, condition: Callable[[list[Member]], bool], prefix: str = WORKERS) -> None:
    async with asyncio.timeout(20):
        while not condition(await members(store, prefix)):
            await asyncio.sleep(0.01)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_entry_is_renewed_while_it_lives_and_removed_at_the_end(store: SqliteStore, tmp_path: Path):
    (tmp_path / "later").mkdir()
    member = Member("unix:/x", "w")
    task = asyncio.create_task(keep_registered(store, WORKERS, lambda: member))
    await registered(store, lambda found: found == [member])
    await store.delete("workers/unix:/x")  # what a store that came back empty looks like
    await registered(store, lambda found: found == [member])
    await ended(task)
    assert await members(store, WORKERS) == []


async def test_a_store_that_fails_is_tried_again(store: SqliteStore, tmp_path: Path):
    task = asyncio.create_task(keep_registered(store, WORKERS, lambda: Member("unix:/x", "w")))
    await asyncio.sleep(0.05)
    assert not task.done()
    (tmp_path / "later").mkdir()
    await registered(store, lambda found: len(found) == 1)
    await ended(task)


async def test_two_of_the_same_name_are_two(store: SqliteStore, tmp_path: Path):
    (tmp_path / "later").mkdir()
    one, two = Member("10.0.0.1:50051", "worker-1"), Member("10.0.0.2:50051", "worker-1")
    tasks = [asyncio.create_task(keep_registered(store, WORKERS, lambda member=member: member)) for member in (one, two)]
    await registered(store, lambda found: found == [one, two])
    await ended(tasks[0])
    assert await members(store, WORKERS) == [two]
    await ended(tasks[1])


async def test_a_token_that_was_raised_is_told_with_the_next_renewal(store: SqliteStore, tmp_path: Path):
    (tmp_path / "later").mkdir()
    token = 7
    task = asyncio.create_task(keep_registered(store, schedulers(0), lambda: Member("s:1", "s", token)))
    await registered(store, lambda found: [one.fencing_token for one in found] == [7], schedulers(0))
    token = 9
    await registered(store, lambda found: [one.fencing_token for one in found] == [9], schedulers(0))
    assert await members(store, schedulers(1)) == []
    await ended(task)


@pytest.mark.parametrize("value", ["", "[]", "1", '{"instance": "x"}', '{"address": "a", "fencing_token": "x"}', "null"])
async def test_an_entry_that_cannot_be_read_hides_no_other(store: SqliteStore, tmp_path: Path, value: str):
    (tmp_path / "later").mkdir()
    await store.put("workers/broken", value, ttl_seconds=60)
    await store.put("workers/w", '{"address": "a", "of_a_newer_version": 1}', ttl_seconds=60)
    assert await members(store, WORKERS) == [Member("a", "")]
