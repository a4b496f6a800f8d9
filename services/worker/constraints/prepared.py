"""The grammars that a scheduler has prepared, by its numbers: written by the server's loop, read by the runner's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.constraints.base import Backend, Grammar
from services.worker.constraints.progress import Progress


@dataclass(frozen=True, slots=True)
class PreparedConstraint:
    """A grammar and the ids that it waits for in the output."""

    grammar: Grammar
    begin_after: tuple[int, ...] = ()


class PreparedTable:
    """What may be opened, by (epoch, id); a new epoch forgets the one before. Methods may be called from any thread."""

    def __init__(self, *, vocab_size: int, endings: Sequence[int]) -> None:
        self._width = -(-vocab_size // 32)
        self._endings = tuple(token for token in endings if token < vocab_size)
        self._lock = threading.Lock()
        self._epoch = 0
        self._known: dict[int, PreparedConstraint] = {}

    @property
    def width(self) -> int:
        """Words of 32 ids in a mask."""
        return self._width

    def restart(self, epoch: int) -> None:
        """A scheduler takes possession: its numbers mean nothing yet."""
        with self._lock:
            self._epoch, self._known = epoch, {}

    def put(self, epoch: int, number: int, prepared: PreparedConstraint) -> bool:
        """Makes a constraint known; False: its epoch is over."""
        with self._lock:
            if epoch == self._epoch:
                self._known[number] = prepared
            return epoch == self._epoch

    def forget(self, epoch: int, numbers: Iterable[int]) -> None:
        """Takes constraints out; outputs that are open keep theirs."""
        with self._lock:
            for number in numbers:
                if epoch == self._epoch:
                    self._known.pop(number, None)

    def grammars(self) -> set[int]:
        """Identities (`id`) of the grammars that are known."""
        with self._lock:
            return {id(prepared.grammar) for prepared in self._known.values()}

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def progress(self, number: int, *, ignore_eos: bool, output: Sequence[int]) -> Progress | None:
        """A constraint's state behind `output`; None: nobody prepared it."""
        with self._lock:
            prepared = self._known.get(number)
        if prepared is None:
            return None
        progress = Progress(
            prepared.grammar,
            width=self._width,
            endings=self._endings,
            begin_after=prepared.begin_after,
            ignore_eos=ignore_eos,
        )
        progress.replay(output)
        return progress


@dataclass(frozen=True, slots=True)
class Constraints:
    """A worker's backend, and what it has prepared."""

    backend: Backend
    table: PreparedTable
