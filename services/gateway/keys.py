"""Which keys open /v1: those of the command line, and those of the store, of which what was asked lately is remembered.

A stored key that is in use costs no call: a task asks for all of them every REFRESH_SECONDS, within which a revocation takes effect. One
that is not known here is looked up when it comes. While the store is away, known keys go on for GRACE_SECONDS after the store last
confirmed them; all others get a 503, for nobody can tell whether they are valid. No key is ever let in because nobody could be asked.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from libs.api_keys import ApiKey, KeyBook, digest_of
from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.store import StoreError
from libs.telemetry.logs import get_logger

REFRESH_SECONDS = 2.0
GRACE_SECONDS = 600.0
# Seconds without use after which a key is forgotten, and looked up again when it comes.
IDLE_SECONDS = 600.0
# Keys that the store did not know, so that a client with a wrong one is not a store call a request; and for how many seconds.
_REFUSED_MOST, _REFUSED_SECONDS = 1024, 2.0
# Keys asked for in one call.
_CHUNK = 500

_log = get_logger("gateway.keys")


@dataclass(slots=True)
class _Known:
    """A stored key, and when it was last confirmed and last used (monotonic nanoseconds)."""

    key: ApiKey
    confirmed_ns: int
    used_ns: int


class KeyRing:
    """See the module. Without a `book` only the static keys count."""

    def __init__(self, static: Sequence[str], book: KeyBook | None, clock: Clock) -> None:
        self._static = [key.encode() for key in static]
        self._book, self._clock = book, clock
        self._known: dict[str, _Known] = {}
        self._refused: OrderedDict[str, int] = OrderedDict()
        self._failing = False

    async def check(self, given: bytes) -> ApiKey | None:
        """The stored key that `given` is, None for a static one. Raises TokenloomError UNAUTHORIZED or STORE_UNAVAILABLE."""
        if not given:
            raise _unauthorized()
        # All are compared, so that time does not tell which one was near.
        if sum(hmac.compare_digest(given, key) for key in self._static):
            return None
        if self._book is None:
            raise _unauthorized()
        # What is looked up is the hash: how long that takes tells nothing about a key that is near.
        digest, now = digest_of(given), self._clock.monotonic_ns()
        known = self._known.get(digest)
        if known is not None and now - known.confirmed_ns <= GRACE_SECONDS * 1e9:
            known.used_ns = now
            return known.key
        if now < self._refused.get(digest, 0):
            raise _unauthorized()
        return await self._look_up(self._book, digest)

    async def _look_up(self, book: KeyBook, digest: str) -> ApiKey:
        try:
            [key] = await book.find([digest])
        except (StoreError, ValueError) as error:
            self._failed(error)
            message = "The API key cannot be checked now: the store of keys does not answer"
            raise TokenloomError(ErrorCode.STORE_UNAVAILABLE, message, retry_after_ms=2000) from None
        now = self._clock.monotonic_ns()
        if key is None:
            self._refuse(digest, now)
            raise _unauthorized()
        self._known[digest] = _Known(key, now, now)
        return key

    def _refuse(self, digest: str, now: int) -> None:
        self._known.pop(digest, None)
        self._refused[digest] = now + round(_REFUSED_SECONDS * 1e9)
        self._refused.move_to_end(digest)
        if len(self._refused) > _REFUSED_MOST:
            self._refused.popitem(last=False)

    async def keep_fresh(self) -> None:
        """Confirms the known keys again and again until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            if self._book is not None:
                await self._refresh(self._book)

    async def _refresh(self, book: KeyBook) -> None:
        now = self._clock.monotonic_ns()
        for digest in [digest for digest, known in self._known.items() if now - known.used_ns > IDLE_SECONDS * 1e9]:
            del self._known[digest]
        digests = list(self._known)
        try:
            for start in range(0, len(digests), _CHUNK):
                chunk = digests[start : start + _CHUNK]
                for digest, key in zip(chunk, await book.find(chunk), strict=True):
                    self._confirm(digest, key, now)
        except (StoreError, ValueError) as error:
            self._failed(error)
            return
        if self._failing:
            _log.info("keys are confirmed again")
        self._failing = False

    def _failed(self, error: Exception) -> None:
        """Said once, not for every request."""
        if not self._failing:
            _log.warning("keys cannot be checked; known ones go on, others get a 503", grace_s=GRACE_SECONDS, reason=str(error))
        self._failing = True

    def _confirm(self, digest: str, key: ApiKey | None, now: int) -> None:
        if key is None:
            self._refuse(digest, now)
        elif (known := self._known.get(digest)) is not None:
            known.key, known.confirmed_ns = key, now


def _unauthorized() -> TokenloomError:
    return TokenloomError(ErrorCode.UNAUTHORIZED, "A valid API key is required: Authorization: Bearer KEY")
