"""Text beside calls, and markers within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.parsers.base import CallArguments, Content, Part, Reasoning
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


def find_first(text: str, markers: Sequence[str], pos: int) -> tuple[int, str]:
    """The first of `markers` from `pos` on; without any, where a marker may have begun at the end of the text, and ""."""
    found = [(at, marker) for marker in markers if (at := text.find(marker, pos)) >= 0]
    if found:
        return min(found)
    for size in range(min(max(map(len, markers)) - 1, len(text) - pos), 0, -1):
        if any(marker.startswith(text[len(text) - size :]) for marker in markers):
            return len(text) - size, ""
    return len(text), ""


def may_become(text: str, pos: int, marker: str) -> bool:
    """Whether the text from `pos` on is a proper beginning of `marker`."""
    return len(text) - pos < len(marker) and marker.startswith(text[pos:])


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts with equal neighbours made one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            result[-1] = CallArguments(part.index, last.fragment + part.fragment)
        else:
            result.append(part)
    return result
