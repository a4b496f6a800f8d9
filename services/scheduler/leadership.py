"""The leader's fencing token and the epochs made from it (PROTOCOL.md rule 25).

The token is raised in the store at every start, so that a worker can tell a new scheduler from an old one; the worker's own check is the
safety. Without a store the token is the wall clock's second: later starts are higher, which is as much as one replica needs. A store that
came back empty counts from 1 again: workers refuse such a token, and it is raised above what they have seen.
"""

from __future__ import annotations

import asyncio
import time

from libs.store import Store, StoreError
from libs.telemetry.logs import get_logger

_COUNTER = "scheduler-fencing-token"
_EPOCH_BITS = 20

log = get_logger(__name__)


class Leadership:
    """`token` is what every attach carries. Made by `take`."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._attaches = 0
        # Several workers refuse at once; the second must see what the first has led to.
        self._deciding = asyncio.Lock()
        self.token = 0

    @classmethod
    async def take(cls, store: Store | None) -> Leadership:
        """Takes the token of a new leader."""
        leadership = cls(store)
        await leadership._raise(at_least=0)
        return leadership

    async def _raise(self, at_least: int) -> None:
        floor = max(at_least, self.token)
        try:
            token = await self._store.raise_counter(_COUNTER, at_least=floor) if self._store else max(int(time.time()), floor + 1)
        except StoreError as error:
            token = max(int(time.time()), floor + 1)
            log.warning("store unreachable; fencing token taken from the clock", token=token, reason=str(error))
        self.token = token

    async def _has_successor(self) -> bool:
        """Whether another scheduler of the same store has taken a token since (False where nobody knows)."""
        try:
            return self._store is not None and await self._store.read_counter(_COUNTER) > self.token
        except StoreError:
            return False

    async def outbid(self, highest_seen: int) -> bool:
        """A worker has seen `highest_seen`: takes a token above it, and above the last one.

        Returns False, and takes none, when another scheduler has taken one from the store since: it leads.
        """
        async with self._deciding:
            if await self._has_successor():
                return False
            if self.token <= highest_seen:
                await self._raise(at_least=highest_seen)
                log.warning("fencing token was too low; raised", token=self.token)
            return True

    async def next_epoch(self) -> tuple[int, int]:
        """(token, epoch): an epoch is never used twice, by this process or by one with another token."""
        async with self._deciding:
            self._attaches += 1
            if self._attaches >> _EPOCH_BITS:  # this token's epochs are used up
                self._attaches = 1
                await self._raise(at_least=self.token)
            return self.token, (self.token << _EPOCH_BITS) | self._attaches
