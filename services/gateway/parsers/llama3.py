"""Calls as Llama 3 writes them: the text is {"name": ..., "parameters": {...}}, several joined by `;`; or they stand behind a tag."""

from __future__ import annotations

from services.gateway.parsers.base import Part
from services.gateway.parsers.machine import CallMachine

TAG = "<|python_tag|>"


class Llama3JsonParser(CallMachine):
    """Without the tag calls stand at the beginning of the text only, and an object needs a name and arguments to be one."""

    def __init__(self) -> None:
        super().__init__(self._start, needs_arguments=True)

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._blanks(text, pos, out)
        if pos < len(text):
            if text[pos] == "{":
                self._start_call(self._between)
            else:
                self._state = self._in_prose
        return pos

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        return self._to_marker(text, pos, out, TAG, self._tagged)

    def _tagged(self, text: str, pos: int, out: list[Part]) -> int:
        return self._expect_call(text, pos, out, self._between)

    def _between(self, text: str, pos: int, out: list[Part]) -> int:
        """Behind a call: a further one, with or without a semicolon or a tag before it, or content."""
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == ";":
            self._lead.append(";")
            self._state = self._tagged
            return pos + 1
        if text[pos] == "{":
            self._start_call(self._between)
        else:
            self._give_up(out)
            self._state = self._in_prose
        return pos
