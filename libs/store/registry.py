"""The registry: workers and schedulers write their addresses into the store under leases that they renew.

    workers/<address>              schedulers find workers here and forget them when they die
    schedulers/<shard>/<address>   gateways find the leader here: the one with the highest fencing token

The address is in the key: instance names, made of process ids, are all the same in containers. Each writes and removes its own entry only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from libs.store.base import Store, StoreError
from libs.telemetry.logs import get_logger

WORKERS = "workers/"
TTL_SECONDS = 10.0
RENEW_SECONDS = 3.0

_log = get_logger(__name__)


def schedulers(shard: int) -> str:
    """Where the schedulers of a shard are."""
    return f"schedulers/{shard}/"


@dataclass(frozen=True, slots=True)
class Member:
    """Who registered: the address to dial, the name in its logs, a scheduler's fencing token."""

    address: str
    instance: str
    fencing_token: int = 0

    def to_json(self) -> str:
        """The entry's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: str) -> Member:
        """Reads an entry; fields that it does not know are a newer version's. Raises ValueError for what is no entry."""
        try:
            found = json.loads(value)
            return cls(str(found["address"]), str(found.get("instance", "")), int(found.get("fencing_token", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a registration: {value[:100]!r} ({type(error).__name__})") from error


async def keep_registered(store: Store, prefix: str, member: Callable[[], Member]) -> None:
    """Writes and renews what `member` says under `prefix` until cancelled, then removes it.

    A store that fails is logged once and tried again: who is known stays known, and a store that came back empty is filled again.
    """
    key, failing = prefix + member().address, False
    try:
        while True:
            try:
                await store.put(key, member().to_json(), ttl_seconds=TTL_SECONDS)
                if failing:
                    _log.info("registered again", key=key)
                failing = False
            except StoreError as error:
                if not failing:
                    _log.warning("registration failed; serving goes on", key=key, reason=str(error))
                failing = True
            await asyncio.sleep(RENEW_SECONDS)
    finally:
        with suppress(StoreError):
            await store.delete(key)


async def members(store: Store, prefix: str) -> list[Member]:
    """Who is registered under `prefix`; an entry that cannot be read is passed over. Raises StoreError."""
    found = []
    for entry in await store.list(prefix):
        try:
            found.append(Member.from_json(entry.value))
        except ValueError as error:
            _log.debug("registry entry passed over", key=entry.key, reason=str(error))
    return found
