"""Registers a worker in the mesh's store, under a lease that it renews, so that schedulers find it and forget it when it dies."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

from libs.store import SqliteStore, StoreError
from libs.telemetry.logs import get_logger

_log = get_logger(__name__)
TTL_SECONDS = 10.0
RENEW_SECONDS = 3.0


async def keep_registered(store: Path, instance: str, address: str) -> None:
    """Writes and renews `workers/<instance>` until cancelled, then removes it. A store that fails is logged once and tried again."""
    key, value, failing = f"workers/{instance}", json.dumps({"address": address}), False
    try:
        while True:
            try:
                await asyncio.to_thread(_put, store, key, value)
                failing = False
            except StoreError as error:
                if not failing:
                    _log.warning("registration failed; serving goes on", reason=str(error))
                failing = True
            await asyncio.sleep(RENEW_SECONDS)
    finally:
        with suppress(StoreError):
            SqliteStore(store).delete(key)


def _put(store: Path, key: str, value: str) -> None:
    SqliteStore(store).put(key, value, ttl_seconds=TTL_SECONDS)
