from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libs.store import SqliteStore
from services.worker import registration


async def until(condition: object) -> None:
    async with asyncio.timeout(20):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_an_entry_is_renewed_while_it_lives_and_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "RENEW_SECONDS", 0.01)
    store = SqliteStore(tmp_path / "store.db")
    task = asyncio.create_task(registration.keep_registered(tmp_path / "store.db", "w", "unix:/x"))
    await until(lambda: store.list("workers/"))
    store.delete("workers/w")
    await until(lambda: store.list("workers/"))
    assert store.list("workers/")[0].value == '{"address": "unix:/x"}'
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert store.list("workers/") == []


async def test_a_store_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "RENEW_SECONDS", 0.01)
    folder = tmp_path / "later"
    task = asyncio.create_task(registration.keep_registered(folder / "store.db", "w", "unix:/x"))
    await asyncio.sleep(0.05)
    assert not task.done()
    folder.mkdir()
    await until(lambda: (folder / "store.db").exists() and SqliteStore(folder / "store.db").list("workers/"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
