"""Time as the services see it: durations from a monotonic clock, instants from the wall, both replaceable in tests and the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds from two clocks."""

    def monotonic_ns(self) -> int:
        """Monotonic nanoseconds; only differences mean anything."""
        ...

    def unix_ns(self) -> int:
        """Wall-clock nanoseconds since the Unix epoch, for traces and logs only."""
        ...


class SystemClock:
    """The machine's clocks. Wall time is anchored once to the monotonic clock, so that instants of one process never run backwards."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def monotonic_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns() + self._offset


class ManualClock:
    """A clock that moves when told to, for tests and the simulator."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self.now_ns = start_ns

    def monotonic_ns(self) -> int:
        """See Clock."""
        return self.now_ns

    def unix_ns(self) -> int:
        """See Clock; the same instant as the monotonic one."""
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds`."""
        self.now_ns += round(seconds * 1e9)
