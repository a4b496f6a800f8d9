"""What a backend for constraints is to the rest of the worker: it compiles in one process and matches in another."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError

# One row of a mask: bit i % 32 (lowest first) of word i // 32 stands for id i.
Words = npt.NDArray[np.int32]


class MatcherBroken(Exception):
    """A matcher that can go no further: a bound of its own was reached, or a token came that it does not allow."""


class Matcher(Protocol):
    """Where one output stands in a grammar. Belongs to one thread at a time."""

    def fill(self, words: Words) -> None:
        """Writes which ids may come next into `words`; bits of ids that end a sequence mean nothing. Raises MatcherBroken."""

    def accept(self, token: int) -> None:
        """Takes one token, which is no end of sequence. Raises MatcherBroken."""

    @property
    def may_end(self) -> bool:
        """Whether the output so far is a whole sentence of the grammar."""


class Grammar(Protocol):
    """A compiled constraint; any number of outputs may be matched against it."""

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes."""

    def matcher(self) -> Matcher:
        """A matcher that has seen nothing."""


class Backend(Protocol):
    """A library for constraints with the model's vocabulary of `vocab_size` ids, of which `endings` end a sequence.

    `name` is what the flag calls it.
    """

    name: str
    vocab_size: int
    endings: tuple[int, ...]

    def compile(self, constraint: Constraint) -> bytes:
        """Checks a constraint and returns what `load` makes a grammar of. For a process that may be killed: it has no bound of its own.

        Raises TokenloomError(INVALID_CONSTRAINT).
        """

    def load(self, compiled: bytes) -> Grammar:
        """The grammar of what `compile` returned, in bounded time."""


def refused(message: str) -> TokenloomError:
    """The refusal of a constraint; whoever knows it adds the parameter."""
    return TokenloomError(ErrorCode.INVALID_CONSTRAINT, message)
