"""Calls as Hermes, Qwen and others write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, text anywhere around."""

from __future__ import annotations

from services.gateway.parsers.base import Part
from services.gateway.parsers.json_scan import skip_blanks
from services.gateway.parsers.machine import CallMachine
from services.gateway.parsers.prose import may_become

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallMachine):
    """A call ends where its object does: a closing marker within a string of it is text, one that is missing is not missed.

    Behind a call and before its closing marker there may be further calls, and stray braces, which are dropped. A closing marker that
    belongs to a call is no content, wherever it comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unclosed = False

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        markers = {OPEN: self._opened, CLOSE: self._closed} if self._unclosed else {OPEN: self._opened}
        return self._to_marker(text, pos, out, markers)

    def _opened(self, text: str, pos: int, out: list[Part]) -> int:
        return self._expect_call(text, pos, out, self._closing)

    def _closed(self, text: str, pos: int, out: list[Part]) -> int:
        self._lead = []
        self._unclosed = False
        self._state = self._in_prose
        return pos

    def _begin_call(self) -> None:
        super()._begin_call()
        self._unclosed = True

    def _closing(self, text: str, pos: int, out: list[Part]) -> int:
        end = skip_blanks(text, pos)
        while end < len(text) and text[end] == "}":
            end = skip_blanks(text, end + 1)
        self._lead.append(text[pos:end])
        if may_become(text, end, CLOSE):
            return self._hold(text, end)
        if text.startswith(CLOSE, end):
            self._state = self._closed
            return end + len(CLOSE)
        if text[end] == "{":
            self._start_call(self._closing)
        else:
            self._give_up(out)
            self._state = self._in_prose
        return end

    def _end(self, out: list[Part]) -> None:
        # A call's closing marker is the format's though the output ends within it, as is what stands before it.
        if self._unclosed and self._state == self._in_prose and CLOSE.startswith(self._held):
            self._held = ""
        if self._state not in (self._closing, self._closed):
            super()._end(out)
