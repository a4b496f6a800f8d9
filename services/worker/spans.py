"""The worker's spans of a request, children of the scheduler's.

Both are built when the sequence ends as far as the worker can tell (its last token ends it, its length is reached), or else when it leaves
its slot. Not before: who they are children of is known then only. A scheduler that was lost never exports its spans; what it had begun
belongs to the request itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from libs.telemetry.tracing import SpanRecord, TraceParent, new_span_id


@dataclass(slots=True)
class Stage:
    """Steps of one stage: Unix nanoseconds of the first one's start and the last one's end, device time, tokens computed."""

    start_ns: int = 0
    end_ns: int = 0
    device_us: int = 0
    steps: int = 0
    tokens: int = 0

    def add(self, start_ns: int, end_ns: int, device_us: int, tokens: int) -> None:
        """Counts one step."""
        if not self.steps:
            self.start_ns = start_ns
        self.end_ns = end_ns
        self.device_us += device_us
        self.steps += 1
        self.tokens += tokens


@dataclass(slots=True)
class Timeline:
    """Where a slot's time went, and the spans above it: `trace` is the scheduler's prefill span (None: not traced).

    `decode_span_id` 0: no decode span. `request_span_id` 0: unknown.
    """

    trace: TraceParent | None
    decode_span_id: int
    request_span_id: int
    prefill: Stage = field(default_factory=Stage)
    decode: Stage = field(default_factory=Stage)
    emitted: bool = False

    def lose_scheduler(self) -> None:
        """The scheduler is gone that had this sequence: its spans will never come, the request's own will."""
        if self.trace is not None and self.request_span_id:
            self.trace = self.trace.child(self.request_span_id)
            self.decode_span_id = self.request_span_id


def spans_of(timeline: Timeline, request: str) -> Iterator[SpanRecord]:
    """`worker.prefill` and `worker.decode`, of those stages that had steps; none where the request is not traced."""
    trace = timeline.trace
    if trace is None:
        return
    if timeline.prefill.steps:
        yield _span("worker.prefill", trace, timeline.prefill, trace.span_id, request)
    if timeline.decode.steps and timeline.decode_span_id:
        yield _span("worker.decode", trace, timeline.decode, timeline.decode_span_id, request)


def _span(name: str, trace: TraceParent, stage: Stage, parent_id: int, request: str) -> SpanRecord:
    return SpanRecord(
        name=name,
        context=trace.child(new_span_id()),
        parent_id=parent_id,
        start_ns=stage.start_ns,
        end_ns=stage.end_ns,
        attributes={
            "tokenloom.request_id": request,
            "tokenloom.device_time_us": stage.device_us,
            "tokenloom.steps": stage.steps,
            "tokenloom.tokens": stage.tokens,
        },
        remote_parent=True,
    )
