"""Calls as Mistral's models write them: [TOOL_CALLS] and an array of objects, or [TOOL_CALLS]name[ARGS]{...} for each call."""

from __future__ import annotations

import re

from services.gateway.parsers.base import Part
from services.gateway.parsers.machine import ArrayMachine
from services.gateway.parsers.prose import may_become

OPEN = "[TOOL_CALLS]"
_MAX_HEADER = 256
# What stands before the arguments: a name, and for some models an id of their own, which is replaced by one of the response's.
_HEADER = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\]\s*)?")
_NO_HEADER = re.compile(r"[^\w.:/\-\[\]\s]")


class MistralParser(ArrayMachine):
    """Both forms, told apart by what follows the marker."""

    def __init__(self) -> None:
        super().__init__()
        self._header: list[str] = []
        self._size = 0

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        return self._to_marker(text, pos, out, {OPEN: self._opened})

    def _opened(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if may_become(text, pos, OPEN):
            return self._hold(text, pos)
        if text.startswith(OPEN, pos):
            self._give_up(out)
            self._state = self._in_prose
        elif text[pos] == "[":
            self._lead.append("[")
            self._state = self._in_array
            return pos + 1
        elif text[pos] == "{":
            self._start_call(self._in_prose)
        else:
            self._header, self._size = [], 0
            self._state = self._in_header
        return pos

    def _in_header(self, text: str, pos: int, out: list[Part]) -> int:
        """The name and what may follow it, up to the `{` of the arguments; bounded, so that prose behind a stray marker is not kept."""
        limit = min(len(text), pos + _MAX_HEADER - self._size)
        found = _NO_HEADER.search(text, pos, limit)
        end = found.start() if found else limit
        self._header.append(text[pos:end])
        self._size += end - pos
        fits = self._size < _MAX_HEADER
        if fits and end == len(text):
            return end
        header = _HEADER.fullmatch("".join(self._header)) if fits and text.startswith("{", end) else None
        if header is None:
            self._lead += self._header
            self._give_up(out)
            self._state = self._in_prose
        else:
            self._begin_arguments(header[1], out)
        self._header = []
        return end

    def _end(self, out: list[Part]) -> None:
        self._lead += self._header
        super()._end(out)
