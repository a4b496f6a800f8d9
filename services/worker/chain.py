"""The chain of batches within an epoch (PROTOCOL.md rule 2): which batch may run, given what ran before it."""

from __future__ import annotations

from libs.errors import ErrorCode, TokenloomError


class Chain:
    """State of the current epoch; a worker has one, its runner's."""

    def __init__(self) -> None:
        self._epoch = 0
        self._last_number = 0
        self._completed = range(0)

    @property
    def epoch(self) -> int:
        """The attach in force; 0: none yet."""
        return self._epoch

    def restart(self, epoch: int) -> None:
        """A new attach: nothing has run yet."""
        self._epoch, self._last_number, self._completed = epoch, 0, range(0)

    def check(self, epoch: int, number: int, predecessor: int) -> TokenloomError | None:
        """Why a batch must not run; None: it may. A predecessor that was a lease may be named by any of its steps."""
        if epoch != self._epoch:
            return _stale(f"batch {number} is of epoch {epoch}, the current one is {self._epoch}")
        if number <= self._last_number:
            return _stale(f"batch {number} comes after step {self._last_number}")
        if predecessor and predecessor not in self._completed:
            return _stale(f"predecessor {predecessor} of batch {number} did not complete")
        return None

    def completed(self, first: int, last: int) -> None:
        """Steps `first` .. `last` of one batch ran, and no more of it will."""
        self._last_number, self._completed = last, range(first, last + 1)

    def broken(self, first: int, at: int, last: int) -> None:
        """Step `at` of a batch that began at `first` failed or was refused, and steps up to `last` were answered as not run."""
        self._last_number = max(self._last_number, last)
        if at > first:  # a lease that ran in part is no longer what its successor counts on
            self._completed = range(0)


def _stale(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.STALE_BATCH, message)
