"""The worker's spans of a request, children of the scheduler's.

`worker.prefill` is built when the first token is sampled, `worker.decode` when the sequence ends as far as the worker can tell (its last
token ends it, its length is reached); what is missing then, when it leaves its slot.
"""

from __future__ import annotations

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
    """Where a slot's time went. `trace`: the scheduler's prefill span; None: not traced. `decode_span_id` 0: no decode span."""

    trace: TraceParent | None
    decode_span_id: int
    prefill: Stage = field(default_factory=Stage)
    decode: Stage = field(default_factory=Stage)
    prefill_emitted: bool = False
    decode_emitted: bool = False


def prefill_span(timeline: Timeline, request: str) -> SpanRecord | None:
    """`worker.prefill`; None: not traced."""
    return None if timeline.trace is None else _span("worker.prefill", timeline.trace, timeline.prefill, timeline.trace.span_id, request)


def decode_span(timeline: Timeline, request: str) -> SpanRecord | None:
    """`worker.decode`; None: not traced, or it never decoded."""
    if timeline.trace is None or not timeline.decode.steps or not timeline.decode_span_id:
        return None
    return _span("worker.decode", timeline.trace, timeline.decode, timeline.decode_span_id, request)


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
