"""Calls as a list of Python calls, [f(a=1), g(b="x")], with which the text begins."""

from __future__ import annotations

import json
import re

from services.gateway.parsers.base import CallArguments, CallBegins, Part
from services.gateway.parsers.machine import CallMachine
from services.gateway.parsers.python_literal import PythonLiteral

_NAME_RUN = re.compile(r"[\w.]*")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_KEYWORD = re.compile(r"[^\W\d]\w*")
_MAX_NAME = 256


class PythonicParser(CallMachine):
    """Arguments have keywords and their values are literals; they become JSON as they come.

    It is certain that a call begins with the `=` of its first argument, or its end where it has none. Behind the list, and from the first
    character on that does not fit, all is content.
    """

    def __init__(self) -> None:
        super().__init__(self._start)
        self._word: list[str] = []
        self._size = 0
        self._function = ""
        self._keywords: set[str] = set()
        self._literal = PythonLiteral()

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._blanks(text, pos, out)
        if pos == len(text):
            return pos
        if text[pos] != "[":
            self._state = self._in_prose
            return pos
        self._lead = ["["]
        self._state = self._before_function
        return pos + 1

    def _before_function(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos < len(text):
            # A comma may stand behind the last call too.
            if text[pos] == "]" and self._calls:
                return self._close(pos)
            self._word, self._size = [], 0
            self._state = self._in_function
        return pos

    def _in_function(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._read_word(text, pos)
        if pos == len(text) and self._size <= _MAX_NAME:
            return pos
        self._function = "".join(self._word)
        if self._size > _MAX_NAME or text[pos] != "(" or not _FUNCTION.fullmatch(self._function):
            return self._fail(pos, out)
        self._keywords = set()
        self._lead.append("(")
        self._state = self._before_keyword
        return pos + 1

    def _before_keyword(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos < len(text):
            if text[pos] == ")":
                return self._end_call(pos, out)
            self._word, self._size = [], 0
            self._state = self._in_keyword
        return pos

    def _in_keyword(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._read_word(text, pos)
        if pos == len(text) and self._size <= _MAX_NAME:
            return pos
        if self._size > _MAX_NAME or not _KEYWORD.fullmatch("".join(self._word)) or "".join(self._word) in self._keywords:
            return self._fail(pos, out)
        self._state = self._before_equals
        return pos

    def _before_equals(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != "=":
            return self._fail(pos, out)
        keyword = "".join(self._word)
        opening = ", " if self._keywords else "{"
        self._begin_if_first(out)
        self._keywords.add(keyword)
        out.append(CallArguments(self._calls - 1, f"{opening}{json.dumps(keyword, ensure_ascii=False)}: "))
        self._literal = PythonLiteral()
        self._state = self._in_value
        return pos + 1

    def _in_value(self, text: str, pos: int, out: list[Part]) -> int:
        taken: list[str] = []
        pos = self._literal.feed(text, pos, taken)
        if fragment := "".join(taken):
            out.append(CallArguments(self._calls - 1, fragment))
        if self._literal.failed:
            self._lead = [self._literal.held]
            return self._fail(pos, out)
        if self._literal.done:
            self._state = self._after_value
        return pos

    def _after_value(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == ")":
            return self._end_call(pos, out)
        if text[pos] != ",":
            return self._fail(pos, out)
        self._lead.append(",")
        self._state = self._before_keyword
        return pos + 1

    def _after_function(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "]":
            return self._close(pos)
        if text[pos] != ",":
            return self._fail(pos, out)
        self._lead.append(",")
        self._state = self._before_function
        return pos + 1

    def _begin_if_first(self, out: list[Part]) -> None:
        self._lead = []
        if not self._keywords:
            out.append(CallBegins(self._calls, self._function))
            self._begin_call()

    def _end_call(self, pos: int, out: list[Part]) -> int:
        fragment = "}" if self._keywords else "{}"
        self._begin_if_first(out)
        out.append(CallArguments(self._calls - 1, fragment))
        self._state = self._after_function
        return pos + 1

    def _close(self, pos: int) -> int:
        """The list ends."""
        self._lead = []
        self._state = self._in_prose
        return pos + 1

    def _fail(self, pos: int, out: list[Part]) -> int:
        self._give_up(out)
        self._state = self._in_prose
        return pos

    def _read_word(self, text: str, pos: int) -> int:
        found = _NAME_RUN.match(text, pos)
        assert found is not None, "an empty run matches everywhere"
        end = min(found.end(), pos + _MAX_NAME + 1 - self._size)
        self._word.append(text[pos:end])
        self._lead.append(text[pos:end])
        self._size += end - pos
        return end

    def _end(self, out: list[Part]) -> None:
        taken: list[str] = []
        if self._state == self._in_value:
            self._literal.finish(taken)
            out += [CallArguments(self._calls - 1, fragment) for fragment in taken]
        # What is open at the end of calls that have begun (a comma, blanks, a bracket) is theirs; all else is content.
        if self._calls and self._state != self._in_prose and not "".join(self._lead).strip(" \t\r\n,"):
            self._lead = []
        super()._end(out)
