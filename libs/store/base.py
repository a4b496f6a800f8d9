"""What the services need of shared state, whoever keeps it."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from libs.store.buckets import Charge, Spending


class StoreError(Exception):
    """The store cannot be reached or is broken; serving goes on without it. The message names the store, never its password."""


class When(enum.Enum):
    """What a `put` asks for: that nothing stands under the key yet, that something does, or neither."""

    ALWAYS = "always"
    ABSENT = "absent"
    PRESENT = "present"


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered value; it disappears when its lease is not renewed."""

    key: str
    value: str


class Store(Protocol):
    """Shared state. Every call is atomic, ends within a few seconds, may raise StoreError and may be repeated.

    After a StoreError nobody knows whether the call took effect. The next call may work: a store is never opened anew.
    """

    @property
    def name(self) -> str:
        """Where it is, without its password."""
        ...

    @property
    def host(self) -> str:
        """The host it is on, as this one knows it; empty: this machine."""
        ...

    async def put(self, key: str, value: str, *, ttl_seconds: float | None, when: When = When.ALWAYS) -> bool:
        """Writes or renews `key` for `ttl_seconds` (None: until it is deleted). Returns whether `when` held; if not, nothing changes."""
        ...

    async def get(self, keys: Sequence[str]) -> list[str | None]:
        """The live values of `keys`, in their order; None where there is none."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """The live entries whose key begins with `prefix`, by key (in the order of their UTF-8)."""
        ...

    async def delete(self, key: str) -> None:
        """Removes `key` if it is there."""
        ...

    async def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        """Sets the counter to max(its value, at_least) + 1, durably, and returns it: a new fencing token (below 2**53)."""
        ...

    async def read_counter(self, name: str) -> int:
        """The counter's value; 0: it was never raised."""
        ...

    async def spend(self, charges: Sequence[Charge]) -> Spending:
        """Takes every charge from its bucket, or none where one does not fit."""
        ...

    async def settle(self, charges: Sequence[Charge]) -> Spending:
        """Takes every charge whatever its bucket holds, which may leave it in debt; a negative cost gives back."""
        ...

    async def close(self) -> None:
        """Ends its connections; no call may follow."""
        ...


class StoreObserver(Protocol):
    """Hears of every call: a service's metrics."""

    def called(self, operation: str, seconds: float, *, failed: bool) -> None:
        """`operation` is the name of a method of Store."""
        ...


# The methods of Store that a StoreObserver hears of.
OPERATIONS = ("put", "get", "list", "delete", "raise_counter", "read_counter", "spend", "settle")


@contextmanager
def observed(observer: StoreObserver | None, operation: str) -> Iterator[None]:
    """Tells `observer`, if there is one, how long the block took and whether it raised."""
    started, failed = time.monotonic(), True
    try:
        yield
        failed = False
    finally:
        if observer is not None:
            observer.called(operation, time.monotonic() - started, failed=failed)
