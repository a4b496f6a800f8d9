"""Stop strings, matched on the bytes of the output as tokens arrive.

UTF-8 synchronises itself, so that matching bytes finds what matching characters would, and a stop string that ends in the
middle of a token or begins many tokens earlier costs nothing extra. Matching starts empty at the first output token: a match
never spans the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.text.automaton import StopAutomaton
from libs.text.decoding import OutputBytes
from libs.text.table import TextTable


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that a token completed; `keep_bytes` raw bytes of the whole output stand before it."""

    stop: str
    keep_bytes: int


class StopMatcher:
    """Follows one choice's output and says when a stop string is complete. Without stop strings it counts bytes."""

    __slots__ = ("_automaton", "_output", "_state", "_stop")

    def __init__(self, table: TextTable, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        """Raises ValueError when a stop string is empty."""
        self._automaton = StopAutomaton(stop) if stop else None
        self._output = OutputBytes(table, skip_special_tokens=skip_special_tokens)
        self._state = 0
        self._stop = tuple(stop)

    @property
    def bytes_so_far(self) -> int:
        """Raw bytes of the output up to and including the last pushed token: what a stop token pushed next would keep."""
        return self._output.count

    def push(self, token_id: int, *, may_match: bool = True) -> StopMatch | None:
        """Takes the next output token; returns the match that it completes, if any.

        Of several strings completed by this token the first in the list wins, cut at its first occurrence that ends within the
        token (vLLM's rule). With `may_match` False (below min_tokens) a match that completes here is void, but one may begin here.
        """
        start = self._output.count
        data = self._output.push_one(token_id)
        if self._automaton is None or not data:
            return None
        automaton, state = self._automaton, self._state
        best, keep_bytes = len(self._stop), 0
        for end, byte in enumerate(data, start + 1):
            state = automaton.step(state, byte)
            for index in automaton.matches[state]:
                if index < best:
                    best, keep_bytes = index, end - automaton.lengths[index]
        self._state = state
        return StopMatch(self._stop[best], keep_bytes) if may_match and best < len(self._stop) else None
