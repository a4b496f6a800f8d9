"""What can be wrong with a file."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path

import psutil
import pytest

from libs.store import StoreError
from libs.store.sqlite import SqliteStore


async def test_a_store_that_cannot_be_opened_says_which(tmp_path: Path):
    with pytest.raises(StoreError, match=r"missing/store\.db"):
        await SqliteStore(tmp_path / "missing" / "store.db").list("")


async def test_a_broken_file_is_a_store_error_and_not_a_database_error(tmp_path: Path):
    path = tmp_path / "store.db"
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StoreError):
        await SqliteStore(path).list("")


async def test_a_file_that_breaks_later_is_a_store_error_once_and_then_an_empty_store(tmp_path: Path):
    store = SqliteStore(tmp_path / "store.db")
    await store.put("key", "", ttl_seconds=60)
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("DROP TABLE entries")
    connection.close()
    with pytest.raises(StoreError):
        await store.list("")
    assert await store.list("") == []


async def test_a_lock_that_is_not_given_up_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("libs.store.sqlite.LOCK_TIMEOUT", 0.01)
    store = SqliteStore(tmp_path / "store.db")
    await store.put("key", "", ttl_seconds=60)
    connection = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        await store.put("key", "new", ttl_seconds=60)
    assert len(await store.list("")) == 1, "readers wait for nobody"
    connection.close()
    assert await store.put("key", "new", ttl_seconds=60)


async def test_no_file_stays_open_until_the_garbage_is_collected(tmp_path: Path):
    gc.disable()  # only a collection would close what was forgotten
    try:
        store = SqliteStore(tmp_path / "store.db")
        await store.put("workers/a", "here", ttl_seconds=60)
        await SqliteStore(tmp_path / "store.db").list("workers/")
        assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]
    finally:
        gc.enable()
