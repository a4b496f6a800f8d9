"""Walks through a fresh grammar in the compiler's process, so that one whose masks break or take too long is refused before it is used."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from services.worker.constraints.base import Grammar, Matcher, MatcherBroken, Words, refused

_Ids = npt.NDArray[np.int64]

_WALKS, _TOKENS = 4, 24
# Steps of a walk in which a token is looked for after which the output may not end (`{}` shows nothing of an object); tokens tried for it.
_EARLY, _TRIES = 4, 4
# CPU seconds that one mask may take here; a usual one takes a ten-thousandth of a second.
MASK_SECONDS = 0.1
# CPU seconds after which no further step is tried: whoever waits behind this one has nothing of it.
PROBE_SECONDS = 0.5


def probe(grammar: Grammar, vocab_size: int, endings: Collection[int]) -> None:
    """Walks at random, by a fixed seed, around the ids that end a sequence; each walk begins with another id as long as there are some.

    Raises TokenloomError(INVALID_CONSTRAINT) that says what is wrong with the grammar's masks.
    """
    until = time.thread_time() + PROBE_SECONDS
    walks = _Walks(grammar, vocab_size, endings)
    for _ in range(_WALKS):
        walks.walk(until)


class _Walks:
    """What the walks through one grammar share: its ids, the draw, and the ids that walks began with."""

    def __init__(self, grammar: Grammar, vocab_size: int, endings: Collection[int]) -> None:
        self._grammar = grammar
        self._endings = [token for token in endings if token < vocab_size]
        self._draw = random.Random(0)
        self._words: Words = np.zeros(-(-vocab_size // 32), np.int32)
        self._begun: list[int] = []

    def walk(self, until: float) -> None:
        """One walk, to where nothing but the end may follow. Raises TokenloomError as `probe`."""
        matcher, path = self._grammar.matcher(), list[int]()
        while len(path) < _TOKENS and time.thread_time() < until:
            try:
                allowed = self._allowed(matcher, len(path))
                if not allowed.size:
                    return
                matcher = self._step(matcher, path, allowed)
            except MatcherBroken as error:
                if matcher.may_end:
                    return
                raise refused(f"the constraint cannot be kept to after {len(path)} tokens: {error}") from error
        if path:
            self._begun.append(path[0])

    def _allowed(self, matcher: Matcher, step: int) -> _Ids:
        began = time.thread_time()
        matcher.fill(self._words)
        if time.thread_time() - began > MASK_SECONDS:
            raise refused(f"the constraint is too complex: after {step} tokens, finding the next takes more than {MASK_SECONDS} s")
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        bits[self._endings] = 0
        if not step:
            bits[self._begun] = 0
        return np.flatnonzero(bits)

    def _step(self, matcher: Matcher, path: list[int], allowed: _Ids) -> Matcher:
        """The matcher behind one more token, which joins the path."""
        count = _TRIES if len(path) < _EARLY else 1
        tries = [int(allowed[place]) for place in self._draw.sample(range(allowed.size), min(count, allowed.size))]
        for last, token in enumerate(tries, 1 - len(tries)):
            if len(tries) == 1:
                matcher.accept(token)
            else:
                matcher = self._behind((*path, token))
            if not last or not matcher.may_end:
                path.append(token)
                break
        return matcher

    def _behind(self, path: Iterable[int]) -> Matcher:
        matcher = self._grammar.matcher()
        for token in path:
            matcher.accept(token)
        return matcher
