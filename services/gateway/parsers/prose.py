"""Text beside calls, and markers within it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

from services.gateway.parsers.base import CallArguments, CallBegins, Content, Part, Reasoning
from services.gateway.parsers.json_scan import BLANKS

# A state of a parser: takes characters from a position on, appends parts, and returns the position behind what it took.
State = Callable[[str, int, list[Part]], int]


class Prose:
    """The content of a message: all text that is no call.

    Blanks beside a call belong to the format, as do those before the first and behind the last: they are content only between two pieces of
    it. So a message that is nothing but calls has no content. Without any call every blank is content.
    """

    __slots__ = ("_blanks", "_called", "_said")

    def __init__(self) -> None:
        self._blanks: list[str] = []
        self._said = False
        self._called = False

    def add(self, text: str, out: list[Part]) -> None:
        """Takes text; trailing blanks wait for what follows."""
        kept = text.rstrip(BLANKS)
        if kept:
            said = "".join([*self._blanks, kept])
            out.append(Content(said.lstrip(BLANKS) if self._called and not self._said else said))
            self._blanks = []
            self._said = True
        if len(kept) < len(text):
            self._blanks.append(text[len(kept) :])

    def call(self) -> None:
        """Notes that a call begins here."""
        self._called = True

    def finish(self, out: list[Part]) -> None:
        """Nothing follows any more."""
        if self._blanks and not self._called:
            out.append(Content("".join(self._blanks)))
        self._blanks = []


def find_first(text: str, markers: tuple[str, ...], pos: int) -> tuple[int, str]:
    """The first of `markers` from `pos` on; without any, where a marker may have begun at the end of the text, and ""."""
    # All at once: one at a time, each that is not there would be looked for to the end of the text behind every other.
    found = _any_of(markers).search(text, pos)
    if found:
        return found.start(), found[0]
    for size in range(min(max(map(len, markers)) - 1, len(text) - pos), 0, -1):
        if any(marker.startswith(text[len(text) - size :]) for marker in markers):
            return len(text) - size, ""
    return len(text), ""


@functools.lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def may_become(text: str, pos: int, marker: str) -> bool:
    """Whether the text from `pos` on is a proper beginning of `marker`."""
    return len(text) - pos < len(marker) and marker.startswith(text[pos:])


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts with equal neighbours made one."""
    return [_one(list(equals)) for _, equals in itertools.groupby(parts, _kind)]


def _kind(part: Part) -> tuple[type[Part], int]:
    """What neighbours have in common that are one part. Two calls never begin under one index."""
    return type(part), part.index if isinstance(part, CallBegins | CallArguments) else 0


def _one(parts: Sequence[Part]) -> Part:
    first = parts[0]
    if len(parts) == 1 or isinstance(first, CallBegins):
        return first
    # All of them at once: a text that is put together piece by piece is copied with every piece.
    if isinstance(first, CallArguments):
        return CallArguments(first.index, "".join([part.fragment for part in parts if isinstance(part, CallArguments)]))
    text = "".join([part.text for part in parts if isinstance(part, Content | Reasoning)])
    return Content(text) if isinstance(first, Content) else Reasoning(text)
