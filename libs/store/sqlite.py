"""The store of one machine: one SQLite file."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from libs.store.base import Entry, StoreError, StoreObserver, When, observed
from libs.store.buckets import Charge, Spending, spending, take

# Seconds that a call waits for another process's transaction.
LOCK_TIMEOUT = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, full_at REAL NOT NULL) WITHOUT ROWID;
"""
_T = TypeVar("_T")


class SqliteStore:
    """Store in one SQLite file shared by the processes of one machine (WAL, LOCK_TIMEOUT); every call runs in a thread.

    `clock` gives Unix seconds, by which leases end and buckets fill. Nothing is opened before the first call.
    """

    def __init__(self, path: Path, *, observer: StoreObserver | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._observer, self._clock = path, observer, clock
        self._has_schema = False

    @property
    def name(self) -> str:
        """See Store."""
        return str(self._path)

    @property
    def host(self) -> str:
        """See Store."""
        return ""

    async def put(self, key: str, value: str, *, ttl_seconds: float | None, when: When = When.ALWAYS) -> bool:
        """See Store."""

        def write(connection: sqlite3.Connection) -> bool:
            now = self._clock()
            expires = math.inf if ttl_seconds is None else now + ttl_seconds
            connection.execute("DELETE FROM entries WHERE expires <= ?", (now,))
            if when is not When.ALWAYS:
                here = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None
                if here is (when is When.ABSENT):
                    return False
            connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (key, value, expires))
            return True

        return await self._run("put", write)

    async def get(self, keys: Sequence[str]) -> list[str | None]:
        """See Store."""

        def read(connection: sqlite3.Connection) -> list[str | None]:
            query, now = "SELECT value FROM entries WHERE key = ? AND expires > ?", self._clock()
            rows = [connection.execute(query, (key, now)).fetchone() for key in keys]
            return [None if row is None else str(row[0]) for row in rows]

        return await self._run("get", read, writes=False)

    async def list(self, prefix: str) -> list[Entry]:
        """See Store."""

        def read(connection: sqlite3.Connection) -> list[Entry]:
            query = "SELECT key, value FROM entries WHERE key >= ? AND expires > ? ORDER BY key"
            found = []
            for key, value in connection.execute(query, (prefix, self._clock())):
                if not key.startswith(prefix):
                    break
                found.append(Entry(key, value))
            return found

        return await self._run("list", read, writes=False)

    async def delete(self, key: str) -> None:
        """See Store."""
        await self._run("delete", lambda connection: connection.execute("DELETE FROM entries WHERE key = ?", (key,)))

    async def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        """See Store."""
        statement = "INSERT INTO counters VALUES (?1, ?2 + 1) ON CONFLICT (name) DO UPDATE SET value = max(value, ?2) + 1 RETURNING value"
        return await self._run("raise_counter", lambda connection: int(connection.execute(statement, (name, at_least)).fetchone()[0]))

    async def read_counter(self, name: str) -> int:
        """See Store."""
        query = "SELECT coalesce((SELECT value FROM counters WHERE name = ?), 0)"
        return await self._run("read_counter", lambda connection: int(connection.execute(query, (name,)).fetchone()[0]), writes=False)

    async def spend(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return await self._run("spend", lambda connection: self._take(connection, charges, force=False))

    async def settle(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return await self._run("settle", lambda connection: self._take(connection, charges, force=True))

    def _take(self, connection: sqlite3.Connection, charges: Sequence[Charge], *, force: bool) -> Spending:
        now = self._clock() * 1e6
        connection.execute("DELETE FROM buckets WHERE full_at <= ?", (now,))
        query = "SELECT coalesce((SELECT full_at FROM buckets WHERE name = ?), ?)"
        before = [connection.execute(query, (charge.bucket, now)).fetchone()[0] for charge in charges]
        taken, after = take(charges, before, now, force=force)
        rows = zip((charge.bucket for charge in charges), after, strict=True)
        connection.executemany("INSERT OR REPLACE INTO buckets VALUES (?, ?)", rows)
        return spending(charges, after, now, taken=taken)

    async def close(self) -> None:
        """See Store. Nothing is open between two calls."""

    async def _run(self, operation: str, work: Callable[[sqlite3.Connection], _T], *, writes: bool = True) -> _T:
        """`work` in one transaction, in a thread."""

        def transact() -> _T:
            with self._connected() as connection:
                connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                try:
                    result = work(connection)
                except BaseException:
                    connection.rollback()
                    raise
                connection.commit()
                return result

        with observed(self._observer, operation):
            return await asyncio.to_thread(transact)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection for one call. It is closed by hand: it stands in a cycle of references, and its files stay open till then."""
        try:
            with closing(sqlite3.connect(self._path, timeout=LOCK_TIMEOUT, isolation_level=None)) as connection:
                if not self._has_schema:
                    _prepare(connection)
                    self._has_schema = True
                yield connection
        except sqlite3.Error as error:
            self._has_schema = False  # a file that was replaced by an empty one is filled anew
            raise StoreError(f"{self._path}: {error}") from error


def _prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables of a new file. The change to WAL does not wait for others that make it at the same time, so it is tried again."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
