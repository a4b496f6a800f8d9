"""One output's way through its constraint: a pure function of the grammar and the output's ids, as all state of a slot."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from libs.telemetry.logs import get_logger
from services.worker.constraints.base import Grammar, MatcherBroken, Words

_log = get_logger(__name__)

# CPU seconds that one mask may take, some thousand times the usual: more, and the output ends, since all rows of a step wait for it.
MASK_SECONDS = 0.5
# Characters of a library's reason that a client is told.
_LONGEST_REASON = 300


class Progress:
    """Fills masks and takes tokens. Belongs to the runner's thread.

    An output is free until `begin_after` has appeared in it. Ids that end a sequence are allowed where the grammar may end; with
    `ignore_eos` only where nothing else is. A matcher that breaks allows nothing more, which ends its own row as a dead end.
    """

    def __init__(
        self, grammar: Grammar, *, width: int, endings: Sequence[int], begin_after: Sequence[int] = (), ignore_eos: bool = False
    ) -> None:
        """`width`: words of a mask; `endings`: ids that end a sequence."""
        self._matcher = grammar.matcher()
        self._endings = frozenset(endings)
        self._ending_words = _words_of(endings, width)
        self._begin_after = tuple(begin_after)
        self._seen: tuple[int, ...] = ()
        self._ignore_eos = ignore_eos
        self._next: Words | None = None
        self._waiting = bool(self._begin_after)
        self._broken = ""
        self._ended = False

    @property
    def broken(self) -> str:
        """Why the matcher can go no further; empty: it can."""
        return self._broken

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._ended

    def replay(self, output: Sequence[int]) -> None:
        """Takes the ids of an output that goes on."""
        for token in output:
            self._take(token)
        self._look_ahead()

    def accept(self, token: int) -> None:
        """Takes the token that a step sampled."""
        self._take(token)
        self._look_ahead()

    def fill(self, words: Words) -> None:
        """Writes which ids may come next. Changes nothing of what the output may become."""
        if self._waiting:
            words[:] = -1
        elif self._broken or self._ended:
            words[:] = 0 if self._broken else self._ending_words
        elif self._next is not None:
            words[:] = self._next
        else:
            self._fill(words)

    def _take(self, token: int) -> None:
        self._next = None
        if self._waiting:
            self._seen = (*self._seen, token)[-len(self._begin_after) :]
            self._waiting = self._seen != self._begin_after
        elif token in self._endings:
            self._ended = True
        elif not self._broken:
            try:
                self._matcher.accept(token)
            except MatcherBroken as error:
                self._break(str(error))

    def _look_ahead(self) -> None:
        """Where the output may end, the next mask says whether it must; it is kept for the next step."""
        if self._waiting or self._broken or self._ended or not self._matcher.may_end:
            return
        words = np.zeros_like(self._ending_words)
        self._fill(words)
        if not (words & ~self._ending_words).any():
            self._ended = not self._broken
        self._next = words

    def _fill(self, words: Words) -> None:
        began = time.thread_time()
        try:
            self._matcher.fill(words)
            if time.thread_time() - began > MASK_SECONDS:
                raise MatcherBroken(f"a mask took more than {MASK_SECONDS} s")
        except MatcherBroken as error:
            self._break(str(error))
            words[:] = 0
            return
        words &= ~self._ending_words
        if self._matcher.may_end and not (self._ignore_eos and words.any()):
            words |= self._ending_words

    def _break(self, reason: str) -> None:
        self._broken = reason[:_LONGEST_REASON] or "the matcher broke"
        _log.warning("an output ends because its constraint can go no further", reason=reason)


def _words_of(ids: Sequence[int], width: int) -> Words:
    words = np.zeros(width, np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)
