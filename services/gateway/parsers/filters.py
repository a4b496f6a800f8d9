"""What stands around a parser: text taken out before it, parts taken out behind it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from services.gateway.parsers.base import CallArguments, CallBegins, MessageParser, Part
from services.gateway.parsers.prose import joined


class FirstCall:
    """Only the first call of `inner` is given on (`parallel_tool_calls` false where no grammar enforces it)."""

    def __init__(self, inner: MessageParser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        return _first_call(self._inner.push(text))

    def finish(self) -> list[Part]:
        """See MessageParser."""
        return _first_call(self._inner.finish())


def _first_call(parts: list[Part]) -> list[Part]:
    return joined([part for part in parts if not (isinstance(part, CallBegins | CallArguments) and part.index)])


class WithoutSpecialTokens:
    """Takes the special tokens that `inner` does not know out of its text, as they are out of any other text.

    Where a model spells such a token's text by ordinary ones, that is taken out too: text does not tell. Of two tokens that begin alike the
    shorter is found.
    """

    def __init__(self, inner: MessageParser, dropped: frozenset[str]) -> None:
        """`dropped`: texts of special tokens."""
        self._inner = inner
        self._tokens = _tokens(dropped)
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        text, pos = self._held + text, 0
        kept: list[str] = []
        while True:
            found = self._tokens.pattern.search(text, pos)
            begun = self._tokens.begun(text, pos)
            if found is None or begun < found.start():
                break
            kept.append(text[pos : found.start()])
            pos = found.end()
        self._held = text[begun:]
        return self._inner.push("".join([*kept, text[pos:begun]]))

    def finish(self) -> list[Part]:
        """See MessageParser."""
        return joined([*self._inner.push(self._held), *self._inner.finish()])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Texts to be found. `beginnings` are all their proper prefixes, `longest` the length of the longest of these."""

    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    longest: int

    def begun(self, text: str, pos: int) -> int:
        """Where, from `pos` on, the end of the text may begin a token; the text's length for nowhere."""
        for at in range(max(pos, len(text) - self.longest), len(text)):
            if text[at:] in self.beginnings:
                return at
        return len(text)


@functools.lru_cache(maxsize=8)
def _tokens(texts: frozenset[str]) -> _Tokens:
    alternatives = "|".join(map(re.escape, sorted(filter(None, texts), key=len)))
    beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
    return _Tokens(re.compile(alternatives or "(?!)"), beginnings, max(map(len, beginnings), default=0))
