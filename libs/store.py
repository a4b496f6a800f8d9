"""The small shared state of the mesh behind one interface: a registry with leases, and counters that only grow.

On one machine it is SQLite in the run directory (`SqliteStore`); in a cluster Redis takes its place behind the same protocol.
Nothing on a request's path waits for it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered value; it disappears when its lease is not renewed."""

    key: str
    value: str


class Store(Protocol):
    """What the services need of shared state. Every call may raise StoreError and may be repeated."""

    def put(self, key: str, value: str, *, ttl_seconds: float) -> None:
        """Writes or renews `key` for `ttl_seconds`."""
        ...

    def list(self, prefix: str) -> list[Entry]:
        """The live entries whose key begins with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Removes `key` if it is there."""
        ...

    def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        """Sets the counter to max(its value, at_least) + 1, durably, and returns it: a new fencing token."""
        ...

    def read_counter(self, name: str) -> int:
        """The counter's value; 0: it was never raised."""
        ...


class StoreError(Exception):
    """The store cannot be reached or is broken; serving goes on without it."""


_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


class SqliteStore:
    """Store in one SQLite file shared by the processes of one machine (WAL, 5 s busy timeout)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._connected() as connection:
            connection.executescript(_SCHEMA)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection for one statement. It is closed by hand: it stands in a cycle of references, and its files stay open till then."""
        try:
            with closing(sqlite3.connect(self._path, timeout=5.0, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                yield connection
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[str, str]]:
        with self._connected() as connection:
            return connection.execute(statement, values).fetchall()

    def put(self, key: str, value: str, *, ttl_seconds: float) -> None:
        """See Store."""
        self._run("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (key, value, time.time() + ttl_seconds))

    def list(self, prefix: str) -> list[Entry]:
        """See Store."""
        end = prefix + "\U0010ffff"
        rows = self._run(
            "SELECT key, value FROM entries WHERE key >= ? AND key < ? AND expires > ? ORDER BY key", (prefix, end, time.time())
        )
        return [Entry(key, value) for key, value in rows]

    def delete(self, key: str) -> None:
        """See Store."""
        self._run("DELETE FROM entries WHERE key = ?", (key,))

    def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        """See Store."""
        rows = self._run(
            "INSERT INTO counters VALUES (?1, ?2 + 1) ON CONFLICT (name) DO UPDATE SET value = max(value, ?2) + 1 RETURNING value, ''",
            (name, at_least),
        )
        return int(rows[0][0])

    def read_counter(self, name: str) -> int:
        """See Store."""
        rows = self._run("SELECT value, '' FROM counters WHERE name = ?1", (name,))
        return int(rows[0][0]) if rows else 0
