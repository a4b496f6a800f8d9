"""The built-in trace store: the last traces of a mesh in one SQLite file, found by trace id or by any id of the request.

    traces       one row per trace, in order of arrival (what is deleted first), with its size
    spans        the spans of a trace, keyed by (trace id, span id): a span exported twice is stored once
    request_ids  x-request-id, response id, internal request id -> trace

Bounded by the number of traces and by bytes of spans; the oldest traces go first. One process writes (the receiver of `tokenloom
serve`); any process may read at the same time (WAL).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Attributes whose values name the request, wherever they stand. A client finds its trace by what it was given: the id of the
# response or its x-request-id.
REQUEST_ID_ATTRIBUTES = ("tokenloom.request_id", "tokenloom.x_request_id", "gen_ai.response.id")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS traces (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, trace_id TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS spans (
    trace_id TEXT NOT NULL, span_id TEXT NOT NULL, start_ns INTEGER NOT NULL, span TEXT NOT NULL,
    PRIMARY KEY (trace_id, span_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request_ids (
    request_id TEXT NOT NULL, trace_id TEXT NOT NULL, PRIMARY KEY (request_id, trace_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS request_ids_by_trace ON request_ids (trace_id);
"""


class TraceStoreError(Exception):
    """The file cannot be opened, read or written."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Something that happened within a span; Unix nanoseconds."""

    name: str
    unix_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A finished span. Ids are lower-case hex (32 and 16 digits); `parent_id` "" makes a root. Instants are Unix nanoseconds.

    `kind` is OpenTelemetry's: internal, server, client, producer, consumer.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[StoredEvent] = ()
    instance: str = ""
    error: str | None = None
    kind: str = "internal"

    def request_ids(self) -> list[str]:
        """The names of the request that this span carries; of a request of several choices, each choice's internal id too."""
        found: list[str] = []
        for key in REQUEST_ID_ATTRIBUTES:
            value = self.attributes.get(key)
            found += map(str, value) if isinstance(value, list) else [str(value)] if value else []
        return found

    def to_json(self) -> str:
        """The span as one JSON object."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StoredSpan:
        """The inverse of to_json."""
        fields = json.loads(text)
        return cls(**{**fields, "events": tuple(StoredEvent(**event) for event in fields["events"])})


class TraceStore:
    """The store in one file. `add` may be called from any thread, one at a time; raises TraceStoreError."""

    def __init__(self, path: Path, *, max_traces: int = 10_000, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_traces, self._max_bytes = max_traces, max_bytes
        try:
            self._connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            # A crash of the machine may lose the last traces; one of the process loses none.
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise TraceStoreError(f"cannot open {path}: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """Stores spans in one transaction, then deletes the oldest traces beyond the bounds."""
        with self._transaction():
            for span in spans:
                self._add(span)
            self._prune()

    def delete(self, trace_ids: Iterable[str]) -> None:
        """Deletes traces in one transaction; one that is not there is ignored."""
        with self._transaction():
            for trace_id in trace_ids:
                self._delete(trace_id)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise TraceStoreError(str(error)) from error

    def _add(self, span: StoredSpan) -> None:
        text = span.to_json()
        self._connection.execute("INSERT OR IGNORE INTO traces (trace_id, bytes) VALUES (?, 0)", (span.trace_id,))
        added = self._connection.execute(
            "INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?)", (span.trace_id, span.span_id, span.start_ns, text)
        ).rowcount
        if added:
            self._connection.execute("UPDATE traces SET bytes = bytes + ? WHERE trace_id = ?", (len(text), span.trace_id))
        for request_id in span.request_ids():
            self._connection.execute("INSERT OR IGNORE INTO request_ids VALUES (?, ?)", (request_id, span.trace_id))

    def _prune(self) -> None:
        count, size = self._connection.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM traces").fetchone()
        while count > 1 and (count > self._max_traces or size > self._max_bytes):
            trace_id, freed = self._connection.execute("SELECT trace_id, bytes FROM traces ORDER BY sequence LIMIT 1").fetchone()
            self._delete(trace_id)
            count, size = count - 1, size - freed

    def _delete(self, trace_id: str) -> None:
        for table in ("spans", "request_ids", "traces"):
            self._connection.execute(f"DELETE FROM {table} WHERE trace_id = ?", (trace_id,))


class TraceReader:
    """Reads a store that another process may be writing. Raises TraceStoreError."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)
        except sqlite3.Error as error:
            raise TraceStoreError(f"cannot open {path}: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def find(self, name: str) -> list[str]:
        """The trace ids that `name` (a trace id or any id of a request) stands for, newest first; empty when there is none."""
        rows = self._rows(
            "SELECT trace_id FROM traces WHERE trace_id = ?1 OR trace_id IN (SELECT trace_id FROM request_ids WHERE request_id = ?2) "
            "ORDER BY sequence DESC",
            (name.lower().replace("-", ""), name),
        )
        return [row[0] for row in rows]

    def spans(self, trace_id: str) -> list[StoredSpan]:
        """The spans of a trace by start."""
        return [
            StoredSpan.from_json(row[0]) for row in self._rows("SELECT span FROM spans WHERE trace_id = ? ORDER BY start_ns", (trace_id,))
        ]

    def latest(self, count: int) -> list[str]:
        """The newest trace ids, newest first."""
        return [row[0] for row in self._rows("SELECT trace_id FROM traces ORDER BY sequence DESC LIMIT ?", (count,))]

    def _rows(self, statement: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise TraceStoreError(str(error)) from error
