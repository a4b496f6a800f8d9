"""Server-sent events out of bytes that arrive in any pieces (WHATWG HTML, section 9.2, as far as APIs of this kind use it)."""

from __future__ import annotations

from collections.abc import Iterator

_FIELD = b"data:"


class EventReader:
    """Collects bytes and yields the data of each complete event; comments and other fields are passed over."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes, in order."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data = []
            elif line.startswith(_FIELD):
                self._data.append(line[len(_FIELD) :].removeprefix(b" "))
