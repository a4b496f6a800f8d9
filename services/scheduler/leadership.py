"""The leader's fencing token and the epochs made from it (PROTOCOL.md rule 25).

The token is raised in the store at every start, so that a worker can tell a new scheduler from an old one; the worker's own check is the
safety. Without a store the token is the wall clock's second: later starts are higher, which is as much as one replica needs.
"""

from __future__ import annotations

import time

from libs.store import Store, StoreError
from libs.telemetry.logs import get_logger

_COUNTER = "scheduler-fencing-token"
_EPOCH_BITS = 20

log = get_logger(__name__)


class Leadership:
    """`token` is what every attach carries."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._attaches = 0
        self.token = 0
        self._take(at_least=0)

    def _take(self, at_least: int) -> None:
        floor = max(at_least, self.token)
        try:
            self.token = self._store.raise_counter(_COUNTER, at_least=floor) if self._store else max(int(time.time()), floor + 1)
        except StoreError as error:
            self.token = max(int(time.time()), floor + 1)
            log.warning("store unreachable; fencing token taken from the clock", token=self.token, reason=str(error))

    @property
    def has_successor(self) -> bool:
        """Whether another scheduler of the same store has taken a token since: it may lead, this one may not (False where nobody knows)."""
        try:
            return self._store is not None and self._store.read_counter(_COUNTER) > self.token
        except StoreError:
            return False

    def raise_token(self, highest_seen: int) -> None:
        """A worker has seen `highest_seen`: takes a token above it and above the last one."""
        self._take(at_least=max(highest_seen, self.token))
        log.warning("fencing token was too low; raised", token=self.token)

    def next_epoch(self) -> tuple[int, int]:
        """(token, epoch): an epoch is never used twice, by this process or by one with another token."""
        self._attaches += 1
        if self._attaches >> _EPOCH_BITS:  # this token's epochs are used up
            self._attaches = 1
            self._take(at_least=self.token)
        return self.token, (self.token << _EPOCH_BITS) | self._attaches
