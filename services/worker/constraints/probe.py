"""A walk through a fresh grammar in the compiler's process, so that one whose masks break or take too long is refused before it is used."""

from __future__ import annotations

import random
import time
from collections.abc import Collection

import numpy as np

from services.worker.constraints.base import Grammar, MatcherBroken, refused

_WALKS, _TOKENS = 2, 32
# CPU seconds that one mask may take here; a usual one takes a ten-thousandth of a second.
MASK_SECONDS = 0.1


def probe(grammar: Grammar, vocab_size: int, endings: Collection[int]) -> None:
    """Walks at random, by a fixed seed, around the ids that end a sequence.

    Raises TokenloomError(INVALID_CONSTRAINT) that says what is wrong with the grammar's masks.
    """
    draw, ends = random.Random(0), list(endings)
    words = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(_WALKS):
        matcher = grammar.matcher()
        for step in range(_TOKENS):
            began = time.thread_time()
            try:
                matcher.fill(words)
                allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")), ends)
                if time.thread_time() - began > MASK_SECONDS:
                    raise refused(f"the constraint is too complex: after {step} tokens, finding the next takes more than {MASK_SECONDS} s")
                if not allowed.size:
                    break
                matcher.accept(int(draw.choice(allowed)))
            except MatcherBroken as error:
                if matcher.may_end:
                    break
                raise refused(f"the constraint cannot be kept to after {step} tokens: {error}") from error
