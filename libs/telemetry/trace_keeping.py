"""Which traces stay in the built-in store, decided when a trace is over: failed ones, slow ones, and a share of the rest.

Spans are stored as they come, so that a trace can be read at once; what is not to be kept is deleted when its root has arrived and nothing
more has come for a while. A trace without its root (the gateway died with it) is kept: somebody will want to know. This is what the
collector's tail_sampling does with deploy/otel/collector.yaml.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from libs.clock import Clock
from libs.telemetry.trace_store import StoredSpan, TraceStore

# Seconds without a new span after which a trace with its root is complete: services export twice a second.
SETTLE_SECONDS = 2.0
# Traces whose decision is due, and decisions against a trace that are remembered for late spans. The oldest are forgotten: then they stay.
MAX_UNDECIDED = MAX_REMEMBERED = 10_000


class SpanSink(Protocol):
    """Takes finished spans."""

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """Stores them. Raises TraceStoreError."""
        ...


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """`ratio` (0..1) of all requests is kept, and of the others those that failed or took `slow_seconds` or longer (None: no such rule)."""

    ratio: float = 1.0
    slow_seconds: float | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether there is nothing to decide."""
        return self.ratio >= 1

    def keeps(self, trace_id: str, seconds: float, *, failed: bool) -> bool:
        """The decision over a trace that took `seconds`; by chance it depends on the trace's id alone."""
        return failed or (self.slow_seconds is not None and seconds >= self.slow_seconds) or _share_of(trace_id) < self.ratio


def _share_of(trace_id: str) -> float:
    """A number in [0, 1) made of all of the id. Not of its last bits: those a sampler at the beginning has chosen by already."""
    return int.from_bytes(hashlib.blake2b(trace_id.encode(), digest_size=8).digest()) / 2**64


@dataclass(slots=True)
class _Undecided:
    last_ns: int = 0
    failed: bool = False
    seconds: float | None = None

    def note(self, span: StoredSpan, now_ns: int) -> None:
        self.last_ns = now_ns
        self.failed |= span.error is not None
        if is_request(span):
            self.seconds = (span.end_ns - span.start_ns) / 1e9


def is_request(span: StoredSpan) -> bool:
    """Whether it is the span of a whole request: a root, or the gateway's below a caller's."""
    return not span.parent_id or "http.route" in span.attributes


class TraceKeeper:
    """Between the receiver and its store. Every method may be called from any thread."""

    def __init__(self, store: TraceStore, policy: KeepPolicy, clock: Clock) -> None:
        self._store, self._policy, self._clock = store, policy, clock
        self._undecided: OrderedDict[str, _Undecided] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """Stores spans, but for late ones of a trace that was decided against. Raises TraceStoreError."""
        with self._lock:
            wanted = [span for span in spans if span.trace_id not in self._refused]
            self._store.add(wanted)
            now = self._clock.monotonic_ns()
            for span in wanted:
                self._undecided.setdefault(span.trace_id, _Undecided()).note(span, now)
                self._undecided.move_to_end(span.trace_id)
            while len(self._undecided) > MAX_UNDECIDED:
                self._undecided.popitem(last=False)

    def settle(self) -> int:
        """Decides over the traces that are complete; returns how many were deleted. Raises TraceStoreError."""
        with self._lock:
            due = self._clock.monotonic_ns() - round(SETTLE_SECONDS * 1e9)
            unwanted = []
            for trace_id, trace in list(self._undecided.items()):
                if trace.last_ns > due:
                    break  # in the order of their last spans: all that follow are younger
                if trace.seconds is None:
                    continue
                if not self._policy.keeps(trace_id, trace.seconds, failed=trace.failed):
                    unwanted.append(trace_id)
                del self._undecided[trace_id]
            self._store.delete(unwanted)
            self._refused.update(dict.fromkeys(unwanted))
            while len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)
            return len(unwanted)
