"""Calls as Hermes, Qwen and others write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, text anywhere around."""

from __future__ import annotations

from services.gateway.parsers.base import Part
from services.gateway.parsers.machine import CallMachine
from services.gateway.parsers.prose import may_become

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallMachine):
    """A call ends where its object does: a closing marker within a string of it is text, one that is missing is not missed."""

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        return self._to_marker(text, pos, out, OPEN, self._opened)

    def _opened(self, text: str, pos: int, out: list[Part]) -> int:
        return self._expect_call(text, pos, out, self._closing)

    def _closing(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if may_become(text, pos, CLOSE):
            return self._hold(text, pos)
        self._state = self._in_prose
        if text.startswith(CLOSE, pos):
            self._lead = []
            return pos + len(CLOSE)
        self._give_up(out)
        return pos

    def _end(self, out: list[Part]) -> None:
        if self._state != self._closing:
            super()._end(out)
