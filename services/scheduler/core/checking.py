"""Requests whose constraint no group has compiled yet: a credit, no blocks, and no place in the queue (PROTOCOL.md rule 31).

A request waits here while some group that can hold it owes an answer about its constraint; it leaves for the queue with the first that has
it, and fails once all have refused. Which constraints are compiled where is in checks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from libs.errors import TokenloomError
from services.scheduler.core.checks import Check, Checks, Standing
from services.scheduler.core.request import Request


class Checking:
    """See the module. `checks` says what groups answer."""

    def __init__(self) -> None:
        self.checks = Checks()
        self._waiting: dict[Check, dict[Request, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        """All requests that are being checked."""
        for requests in self._waiting.values():
            yield from requests

    def waiting_for(self, check: Check) -> list[Request]:
        """Those that wait for this one, in the order of their arrival here."""
        return list(self._waiting.get(check, ()))

    def hold(self, request: Request) -> None:
        """The request waits here from now on. Raises ValueError for one without a constraint."""
        self._waiting.setdefault(_check_of(request), {})[request] = None

    def discard(self, request: Request) -> None:
        """The request waits here no longer."""
        check = _check_of(request)
        requests = self._waiting[check]
        del requests[request]
        if not requests:
            del self._waiting[check]

    def is_ready(self, request: Request, group: str) -> bool:
        """Whether the request could be opened in the group: it has no constraint, or that is compiled there."""
        return request.check is None or self.checks.standing(request.check, group) is Standing.READY

    def outlook(self, request: Request, able: Collection[str]) -> Standing:
        """READY where one of the groups that are `able` to hold the request has its constraint, FAILED where none will, else ASKED."""
        if request.check is None:
            return Standing.READY
        found = {self.checks.standing(request.check, group) for group in able}
        if Standing.READY in found:
            return Standing.READY
        patient = Standing.BUSY in found and request.is_resumed
        return Standing.ASKED if Standing.ASKED in found or patient or not able else Standing.FAILED

    def refusal(self, request: Request, able: Collection[str]) -> TokenloomError:
        """Why none of the groups has the constraint: what is wrong with it, rather than that a group was busy. It names the parameter."""
        check = _check_of(request)
        errors = [error for group in able if (error := self.checks.error(check, group)) is not None]
        error = min(errors, key=lambda error: error.code.spec.retryable)
        param = request.constraint.param if request.constraint is not None else error.param
        return TokenloomError(error.code, error.message, param=param, retry_after_ms=error.retry_after_ms)


def _check_of(request: Request) -> Check:
    if request.check is None:
        raise ValueError(f"request {request.key} has no constraint to check")
    return request.check
