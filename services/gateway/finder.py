"""Where the scheduler is: at a fixed address, or where the store's registry says that the leader is."""

from __future__ import annotations

from libs.store import Store, StoreError
from libs.store.registry import members, schedulers
from libs.telemetry.logs import get_logger

_log = get_logger("gateway.finder")


class SchedulerFinder:
    """Asked before every attempt to connect. `fixed` wins; without it the leader is the one with the highest fencing token."""

    def __init__(self, fixed: str, store: Store | None = None, shard: int = 0) -> None:
        self._address, self._store, self._shard = fixed, store, shard

    async def find(self) -> str:
        """The address to dial; the last one known where the store cannot tell; empty: nobody has ever known."""
        if self._store is not None:
            try:
                found = await members(self._store, schedulers(self._shard))
            except StoreError as error:
                _log.debug("the registry cannot be read; the last scheduler known is dialled", reason=str(error))
            else:
                if found:
                    self._address = max(found, key=lambda member: member.fencing_token).address
        return self._address
