"""A call written as a JSON object: {"name": ..., "arguments": {...}}, in any order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.gateway.parsers.base import CallArguments, CallBegins, Part
from services.gateway.parsers.json_scan import BLANKS, JsonScanner, skip_blanks
from services.gateway.parsers.prose import State

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


class CallObject:
    """Reads one call. Its arguments are given on as they come, once the name is known.

    `begun`: it is certain that this is a call: its name and the `{` of its arguments were read (or its end, where they may be missing).
    Further keys are skipped. Arguments that are null or an empty text are {}; a text that holds an object is taken for that object.
    `done` and `failed` are final. `raw`: all that was taken, as long as it has not begun.
    """

    __slots__ = (
        "_arguments",
        "_begin",
        "_index",
        "_key",
        "_name",
        "_needs_arguments",
        "_scanner",
        "_state",
        "_value",
        "done",
        "failed",
        "raw",
    )

    def __init__(self, index: int, begin: Callable[[], None], *, needs_arguments: bool = False) -> None:
        """`begin` is called when it has begun as call `index`."""
        self._index, self._begin, self._needs_arguments = index, begin, needs_arguments
        self._scanner = JsonScanner()
        self._state: State = self._start
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] | None = None
        self._value: list[str] = []
        self.done = False
        self.failed = False
        self.raw: list[str] | None = []

    @property
    def begun(self) -> bool:
        """See the class."""
        return self.raw is None

    def feed(self, text: str, pos: int, out: list[Part]) -> int:
        """Takes characters from `pos` on, until the text or the object ends or fails; returns the position behind the last one taken."""
        start = pos
        while pos < len(text) and not self.done and not self.failed:
            pos = self._state(text, pos, out)
        if self.raw is not None:
            self.raw.append(text[start:pos])
        return pos

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        return self._take(text, pos, {"{": self._first_key})

    def _take(self, text: str, pos: int, follows: dict[str, State]) -> int:
        """Takes blanks and then one of the characters in `follows`, which names the state behind it."""
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] not in follows:
            self.failed = True
            return pos
        self._state = follows[text[pos]]
        return pos + 1

    def _first_key(self, text: str, pos: int, out: list[Part]) -> int:
        pos = skip_blanks(text, pos)
        if pos < len(text) and text[pos] == "}":
            return self._end(pos, out)
        return self._next_key(text, pos, out)

    def _next_key(self, text: str, pos: int, out: list[Part]) -> int:
        pos = skip_blanks(text, pos)
        if pos < len(text):
            if text[pos] == '"':
                self._begin_value(self._in_key)
            else:
                self.failed = True
        return pos

    def _begin_value(self, state: State) -> None:
        self._scanner, self._value, self._state = JsonScanner(), [], state

    def _scan(self, text: str, pos: int) -> int:
        pos = self._scanner.feed(text, pos, self._value)
        self.failed = self._scanner.failed
        return pos

    def _in_key(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._scan(text, pos)
        if self._scanner.done:
            self._key = json.loads("".join(self._value))
            twice = (self._key == NAME and self._name is not None) or (self._key in ARGUMENTS and self._arguments is not None)
            self.failed = twice
            self._state = self._colon
        return pos

    def _colon(self, text: str, pos: int, out: list[Part]) -> int:
        return self._take(text, pos, {":": self._choose})

    def _choose(self, text: str, pos: int, out: list[Part]) -> int:
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if self._key == NAME:
            self.failed = char != '"'
            self._begin_value(self._in_name)
        elif self._key not in ARGUMENTS:
            self._begin_value(self._in_other)
        elif char == "{":
            self._arguments = []
            self._begin_value(self._in_arguments)
            self._begin_if_known(out)
        else:
            self.failed = char not in '"n'
            self._begin_value(self._in_text_of_arguments)
        return pos

    def _in_name(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._scan(text, pos)
        if self._scanner.done:
            self._name = json.loads("".join(self._value))
            # A lone surrogate is no text that could be sent to anybody.
            self.failed = not self._name or _SURROGATE.search(self._name) is not None
            self._state = self._after_value
            if not self.failed and self._arguments is not None:
                self._begin_if_known(out)
        return pos

    def _in_other(self, text: str, pos: int, out: list[Part]) -> int:
        # Its text is not kept: one of any length may come.
        pos = self._scanner.feed(text, pos)
        self.failed = self._scanner.failed
        if self._scanner.done:
            self._state = self._after_value
        return pos

    def _in_arguments(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._scan(text, pos)
        self._give(self._value, out)
        self._value = []
        if self._scanner.done:
            self._state = self._after_value
        return pos

    def _in_text_of_arguments(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._scan(text, pos)
        if self._scanner.done:
            arguments = _object_in(json.loads("".join(self._value)))
            self._state = self._after_value
            if arguments is None:
                self.failed = True
            else:
                self._arguments = []
                self._begin_if_known(out)
                self._give([arguments], out)
        return pos

    def _begin_if_known(self, out: list[Part]) -> None:
        """Begins the call when its name is known; `_arguments` holds what has come of them before it."""
        if self._name is None or self._arguments is None:
            return
        self.raw = None
        self._begin()
        out.append(CallBegins(self._index, self._name))
        self._give(self._arguments, out)

    def _give(self, fragments: list[str], out: list[Part]) -> None:
        if not self.begun:
            assert self._arguments is not None, "arguments have begun"
            self._arguments += fragments
        elif fragment := "".join(fragments):
            out.append(CallArguments(self._index, fragment))

    def _after_value(self, text: str, pos: int, out: list[Part]) -> int:
        pos = skip_blanks(text, pos)
        if pos < len(text) and text[pos] == "}":
            return self._end(pos, out)
        return self._take(text, pos, {",": self._next_key})

    def _end(self, pos: int, out: list[Part]) -> int:
        if not self.begun:
            if self._name is None or self._needs_arguments:
                self.failed = True
                return pos
            self._arguments = ["{}"]
            self._begin_if_known(out)
        self.done = True
        return pos + 1


def _object_in(value: str | None) -> str | None:
    """The text of the JSON object that `value` holds, {} for nothing; None when it holds something else."""
    text = (value or "").strip(BLANKS)
    if not text:
        return "{}"
    scanner, taken = JsonScanner(), list[str]()
    whole = text[0] == "{" and scanner.feed(text, 0, taken) == len(text) and scanner.done
    # Escaped lone surrogates have become characters; within a string of JSON each may stand as its escape again.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", "".join(taken)) if whole else None
