"""Calls as Llama 3 writes them: {"name": ..., "parameters": {...}}, one behind another or in a list, behind a tag or bare."""

from __future__ import annotations

import re

from services.gateway.parsers.base import Part
from services.gateway.parsers.machine import CallMachine
from services.gateway.parsers.prose import find_first, may_become

TAG = "<|python_tag|>"
# What models write between calls and behind the last.
_SEPARATORS = re.compile(r"[ \t\n\r;,}]*")


class Llama3JsonParser(CallMachine):
    """A call may begin anywhere in the text, as in vLLM; an object needs a name and arguments to be one.

    Semicolons, commas and stray braces beside calls belong to the format, as do the brackets of a list of calls.
    """

    def __init__(self) -> None:
        super().__init__(needs_arguments=True)
        self._listed = False

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        at, found = find_first(text, (TAG, "{", "["), pos)
        self._prose.add(text[pos:at], out)
        if not found:
            return self._hold(text, at)
        if found == "{":
            self._start_call(self._between)
            return at
        self._lead = [found]
        self._state = self._tagged if found == TAG else self._in_list
        return at + len(found)

    def _tagged(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos < len(text) and text[pos] == "[":
            self._lead.append("[")
            self._state = self._in_list
            return pos + 1
        return self._expect_call(text, pos, out, self._between)

    def _in_list(self, text: str, pos: int, out: list[Part]) -> int:
        return self._expect_call(text, pos, out, self._between)

    def _begin_call(self) -> None:
        self._listed = self._listed or "[" in self._lead
        super()._begin_call()

    def _between(self, text: str, pos: int, out: list[Part]) -> int:
        """Behind a call: a further one, or content."""
        found = _SEPARATORS.match(text, pos)
        assert found is not None, "an empty run matches everywhere"
        self._lead.append(found[0])
        pos = found.end()
        if may_become(text, pos, TAG):
            return self._hold(text, pos)
        if text.startswith(TAG, pos):
            self._lead.append(TAG)
            self._state = self._tagged
            return pos + len(TAG)
        if text[pos] == "]" and self._listed:
            self._lead = []
            self._listed = False
            return pos + 1
        if text[pos] == "{":
            self._start_call(self._between)
        else:
            self._give_up(out)
            self._state = self._in_prose
        return pos

    def _end(self, out: list[Part]) -> None:
        if self._state != self._between or self._held:
            super()._end(out)
