"""Admission before any work is done: what this gateway has outstanding against what the scheduler's window allows (rule 20).

The window is the first filter, cheap and approximate: tokens are estimated before encoding and settled to real ones at submit.
The scheduler's own bound is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.errors import ErrorCode, TokenloomError
from services.gateway.session import Window

RETRY_AFTER_MS = 1000


class Lease:
    """One sequence's place in the window, held from admission to its ending. Released exactly once, however often it is asked."""

    __slots__ = ("_admission", "_tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission: Admission | None = admission
        self._tokens = tokens
        admission.sequences += 1
        admission.tokens += tokens

    def settle(self, tokens: int) -> None:
        """Replaces the estimate by the real number of tokens (prompt + max_tokens)."""
        if self._admission is not None:
            self._admission.tokens += tokens - self._tokens
            self._tokens = tokens

    def release(self) -> None:
        """Gives the place back."""
        if self._admission is not None:
            self._admission.sequences -= 1
            self._admission.tokens -= self._tokens
            self._admission = None


class Admission:
    """What is outstanding now."""

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0

    def admit(self, window: Window, estimates: Sequence[int]) -> list[Lease]:
        """Takes a place for each estimate (tokens), or for none.

        Raises TokenloomError OVER_WINDOW when they do not fit. Through an open window a gateway with nothing outstanding may always
        submit one whole request, or one that is larger than an idle gateway's part would never run; the scheduler's bound still holds.
        """
        sequences, tokens = self.sequences + len(estimates), self.tokens + sum(estimates)
        if sequences > window.max_outstanding and (self.sequences or not window.max_outstanding):
            raise _over(f"{self.sequences} sequences are running or waiting; {len(estimates)} more exceed {window.max_outstanding}")
        if tokens > window.max_outstanding_tokens and self.sequences:
            raise _over(f"{self.tokens} tokens are running or waiting; {sum(estimates)} more exceed {window.max_outstanding_tokens}")
        return [Lease(self, estimate) for estimate in estimates]


def _over(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.OVER_WINDOW, f"The server is at its limit: {message}.", retry_after_ms=RETRY_AFTER_MS)
