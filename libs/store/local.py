"""The buckets of one process: what quotas fall back to while the store is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from libs.store.buckets import Charge, Spending, spending, take

# Buckets beyond which those that are full again, which are as good as none, are swept out.
_SWEEP_AT = 1024


class LocalBuckets:
    """See Store.spend and Store.settle; in memory, at once, without errors. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def spend(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return self._take(charges, force=False)

    def settle(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return self._take(charges, force=True)

    def clear(self) -> None:
        """Every bucket is full again."""
        self._full_at.clear()

    def _take(self, charges: Sequence[Charge], *, force: bool) -> Spending:
        now = self._clock() * 1e6
        before = [self._full_at.get(charge.bucket, now) for charge in charges]
        taken, after = take(charges, before, now, force=force)
        self._full_at.update(zip((charge.bucket for charge in charges), after, strict=True))
        if len(self._full_at) > _SWEEP_AT:
            self._full_at = {bucket: at for bucket, at in self._full_at.items() if at > now}
        return spending(charges, after, now, taken=taken)
