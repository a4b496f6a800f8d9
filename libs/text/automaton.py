"""Finding many strings in a stream of bytes, one step per byte (Aho and Corasick, "Efficient string matching", CACM 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The automaton of a list of stop strings, over their UTF-8 bytes. State 0 is the start; states are small integers.

    Immutable once built, so that any number of matchers may share one. Per state: `depth`, the length of the longest suffix of the
    input that begins a stop string; `matches`, the indices of the strings that end here; `longest`, the length of the longest of
    them (0: none ends here). `lengths` holds the strings' own lengths in bytes.
    """

    __slots__ = ("_edges", "_fail", "depth", "lengths", "longest", "matches")

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises ValueError when a string is empty: it would match everywhere."""
        if not all(stop):
            raise ValueError("a stop string cannot be empty")
        patterns = [text.encode("utf-8", "surrogatepass") for text in stop]
        self.lengths = [len(pattern) for pattern in patterns]
        self._edges: list[dict[int, int]] = [{}]
        self.depth = [0]
        ends: list[list[int]] = [[]]
        for index, pattern in enumerate(patterns):
            ends[self._insert(pattern, ends)].append(index)
        self._fail = [0] * len(self._edges)
        self._link(ends)
        self.matches = [tuple(sorted(indices)) for indices in ends]
        self.longest = [max((self.lengths[index] for index in indices), default=0) for indices in ends]

    def _insert(self, pattern: bytes, ends: list[list[int]]) -> int:
        state = 0
        for byte in pattern:
            following = self._edges[state].get(byte)
            if following is None:
                following = len(self._edges)
                self._edges[state][byte] = following
                self._edges.append({})
                self.depth.append(self.depth[state] + 1)
                ends.append([])
            state = following
        return state

    def _link(self, ends: list[list[int]]) -> None:
        """Breadth first, so that a state's failure link, which is always shorter, is complete before it is used."""
        waiting = deque(self._edges[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, following in self._edges[state].items():
                waiting.append(following)
                self._fail[following] = self.step(self._fail[state], byte)
                ends[following].extend(ends[self._fail[following]])

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        while True:
            following = self._edges[state].get(byte)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]
