"""Reasoning apart from the message: <think>...</think> and what follows."""

from __future__ import annotations

from services.gateway.parsers.base import Content, MessageParser, Part, Reasoning
from services.gateway.parsers.json_scan import skip_blanks
from services.gateway.parsers.prose import State, find_first, joined, may_become

OPEN = "<think>"
CLOSE = "</think>"


class PlainText:
    """All text is content."""

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """See MessageParser."""
        return []


class ReasoningParser:
    """Reasoning up to the closing marker; what follows is `inner`'s. Blanks before the opening marker are dropped with it.

    `always`: the text begins within the reasoning, because the chat template opened it; an opening marker may come all the same. Else
    there is reasoning only where the text begins with the marker. Reasoning that is never closed goes on to the end.
    """

    def __init__(self, inner: MessageParser, *, always: bool) -> None:
        self._inner, self._always = inner, always
        self._state: State = self._start
        self._blanks: list[str] = []
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        out: list[Part] = []
        text, pos = self._held + text, 0
        self._held = ""
        while pos < len(text):
            pos = self._state(text, pos, out)
        return joined(out)

    def finish(self) -> list[Part]:
        """See MessageParser."""
        out: list[Part] = []
        rest = "".join([*self._blanks, self._held])
        if rest and (self._always or self._state == self._in_reasoning):
            out.append(Reasoning(rest))
        elif rest:
            out += self._inner.push(rest)
        return joined([*out, *self._inner.finish()])

    def _start(self, text: str, pos: int, out: list[Part]) -> int:
        end = skip_blanks(text, pos)
        self._blanks.append(text[pos:end])
        if end == len(text):
            return end
        if may_become(text, end, OPEN):
            self._held = text[end:]
            return len(text)
        blanks, self._blanks = "".join(self._blanks), []
        if text.startswith(OPEN, end):
            self._state = self._in_reasoning
            return end + len(OPEN)
        self._state = self._in_reasoning if self._always else self._behind
        if blanks:
            out += [Reasoning(blanks)] if self._always else self._inner.push(blanks)
        return end

    def _in_reasoning(self, text: str, pos: int, out: list[Part]) -> int:
        at, found = find_first(text, (CLOSE,), pos)
        if at > pos:
            out.append(Reasoning(text[pos:at]))
        if found:
            self._state = self._behind
            return at + len(CLOSE)
        self._held = text[at:]
        return len(text)

    def _behind(self, text: str, pos: int, out: list[Part]) -> int:
        out += self._inner.push(text[pos:])
        return len(text)
