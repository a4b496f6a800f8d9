"""Calls that a constraint makes certain: the output is JSON of a form that services.gateway.parsers.planning asks for.

That JSON is the server's own and no content, however much of it has come when the output ends.
"""

from __future__ import annotations

from services.gateway.parsers.base import Part
from services.gateway.parsers.machine import ArrayMachine, CallMachine


class RequiredCalls(ArrayMachine):
    """The output is a list of calls, [{"name": ..., "parameters": {...}}, ...]."""

    def __init__(self) -> None:
        super().__init__(self._start)

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != "[":
            self._give_up(out)
            self._state = self._in_prose
            return pos
        self._lead.append("[")
        self._state = self._in_array
        return pos + 1

    def _end(self, out: list[Part]) -> None:
        if self._state == self._in_prose:
            super()._end(out)


class NamedCall(CallMachine):
    """The output is the arguments of the one tool that the client named."""

    def __init__(self, name: str) -> None:
        super().__init__(self._start)
        self._name = name

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos < len(text):
            if text[pos] == "{":
                self._begin_arguments(self._name, out)
            else:
                self._give_up(out)
                self._state = self._in_prose
        return pos

    def _end(self, out: list[Part]) -> None:
        if self._state == self._in_prose:
            super()._end(out)
