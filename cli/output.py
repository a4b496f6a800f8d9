"""Everything the mesh prints, through one thread: a terminal that stands still (Ctrl-S, a full pipe) must not stall the services.

The services' log lines arrive here from their pipes. At most `CAPACITY` lines wait; beyond it log lines are dropped and counted, and
the count is printed as soon as there is room. What is for people (the banner, errors) is never dropped.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

CAPACITY = 10_000
_COLOURS = {"gateway": "34", "scheduler": "33", "tokenizer": "36", "worker": "32", "traces": "35", "supervisor": "1"}
_WIDTH = max(map(len, _COLOURS))

LogFormat = Literal["console", "json"]


class Output:
    """A writer for two streams: log lines to `err`, words to the user to `out`."""

    def __init__(self, log_format: LogFormat, *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._format = log_format
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._colours = log_format == "console" and self._err.isatty()
        self._queue: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def forward(self, service: str, line: str) -> None:
        """A line of a service's log: as it is when it is a JSON object (it names its service), else behind the service's name."""
        if self._queue.qsize() >= CAPACITY:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            self.event("warning", f"{lost} log lines were dropped: the terminal does not keep up", dropped=lost)
        plain = self._format == "json" and line.startswith("{")
        self._queue.put((self._err, line if plain else f"{self._prefix(service)} {line}"))

    def event(self, level: str, event: str, **fields: Any) -> None:
        """A log line of the supervisor's own, in the services' format."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._format == "json":
            line = json.dumps({**fields, "event": event, "level": level, "timestamp": now, "service": "supervisor"})
        else:
            line = f"{self._prefix('supervisor')} {now} [{level:<9}] {event}"
        self._queue.put((self._err, line))

    def say(self, text: str) -> None:
        """Words for the user, on stdout."""
        self._queue.put((self._out, text))

    def complain(self, text: str) -> None:
        """An error for the user, on stderr."""
        self._queue.put((self._err, text))

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Writes what waits, for at most `timeout_seconds`."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def _prefix(self, service: str) -> str:
        name = f"{service:<{_WIDTH}} |"
        return f"\x1b[{_COLOURS.get(service, '0')}m{name}\x1b[0m" if self._colours else name

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            try:
                stream.write(text + "\n")
                if self._queue.empty():
                    self._out.flush()
                    self._err.flush()
            except (OSError, ValueError):
                continue  # the reader is gone (`| head`, a closed terminal): serving goes on without words
        try:
            self._out.flush()
            self._err.flush()
        except (OSError, ValueError):
            return
