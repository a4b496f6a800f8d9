"""Spans made by hand: built when their stage is over, from instants the service kept anyway, with ids chosen in advance.

Library instrumentation would make a span per SSE chunk and an endless one per stream. Here the hot path only remembers
nanoseconds; when a stage ends, `Tracer.emit` builds an OpenTelemetry ReadableSpan and hands it to the batch processors,
which export over OTLP in their own thread. A span id can be chosen before its span exists (`new_span_id`), so that a child in
another process can name its parent while the parent is still running.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
# A member of a tracestate as the W3C recommendation has it, blanks around it allowed.
_KEY_REST = r"[a-z0-9_\-*/]"
_STATE_KEY = rf"(?:[a-z]{_KEY_REST}{{0,255}}|[a-z0-9]{_KEY_REST}{{0,240}}@[a-z]{_KEY_REST}{{0,13}})"
_STATE_MEMBER = re.compile(rf"[ \t]*({_STATE_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e][ \t]*")
_MAX_STATE_MEMBERS = 32
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A W3C trace context: 128-bit trace id, 64-bit span id, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceParent | None:
        """The context of a `traceparent` header; None for an empty or invalid one, as the W3C recommendation asks.

        An invalid `tracestate` is dropped here, once: the SDK would find it invalid again, and warn of it, for each span.
        """
        match = _TRACEPARENT.match(traceparent.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(int(match[4], 16) & 1), tracestate if _is_valid_state(tracestate) else "")

    @classmethod
    def new(cls, *, sampled: bool = True) -> TraceParent:
        """The context of a new trace's root span."""
        return cls(_random.getrandbits(128) or 1, new_span_id(), sampled)

    def child(self, span_id: int) -> TraceParent:
        """The same trace as seen by the children of span `span_id`."""
        return TraceParent(self.trace_id, span_id, self.sampled, self.state)

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def _is_valid_state(tracestate: str) -> bool:
    members = [member for member in tracestate.split(",") if member.strip(" \t")]
    matches = [match for member in members if (match := _STATE_MEMBER.fullmatch(member)) is not None]
    return len(members) == len(matches) == len({match[1] for match in matches}) <= _MAX_STATE_MEMBERS


def new_span_id() -> int:
    """A random non-zero 64-bit id."""
    return _random.getrandbits(64) or 1


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span, at a wall-clock instant in Unix nanoseconds."""

    name: str
    unix_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished stage. `context` names the span itself; `parent_id` 0 makes it a root. Instants are Unix nanoseconds."""

    name: str
    context: TraceParent
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    remote_parent: bool = False


class Tracer:
    """Exports the spans of one process. Without endpoints and exporters it drops them at the cost of one comparison."""

    def __init__(self, service: str, instance: str, endpoints: Sequence[str] = (), exporters: Sequence[SpanExporter] = ()) -> None:
        self._resource = Resource.create(
            {"service.name": f"tokenloom-{service}", "service.namespace": "tokenloom", "service.instance.id": instance}
        )
        all_exporters = [
            *exporters,
            *(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")) for endpoint in endpoints),
        ]
        # Queue of 8192 spans per endpoint, exported twice a second in batches of 512; beyond it the SDK drops and says so in its log.
        self._processors = [
            BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=500, max_export_batch_size=512)
            for exporter in all_exporters
        ]
        self._scope = InstrumentationScope("tokenloom")

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self._processors)

    def emit(self, record: SpanRecord) -> None:
        """Queues a finished span for export; spans of unsampled traces are dropped."""
        if not self._processors or not record.context.sampled:
            return
        span = self._readable(record)
        for processor in self._processors:
            processor.on_end(span)

    def _readable(self, record: SpanRecord) -> ReadableSpan:
        flags = TraceFlags(TraceFlags.SAMPLED)
        state = TraceState.from_header([record.context.state]) if record.context.state else TraceState()
        parent = SpanContext(record.context.trace_id, record.parent_id, record.remote_parent, flags, state) if record.parent_id else None
        return ReadableSpan(
            name=record.name,
            context=SpanContext(record.context.trace_id, record.context.span_id, False, flags, state),
            parent=parent,
            resource=self._resource,
            attributes=dict(record.attributes),
            events=[Event(event.name, dict(event.attributes), event.unix_ns) for event in record.events],
            kind=record.kind,
            status=Status(StatusCode.ERROR, record.error) if record.error is not None else Status(),
            start_time=record.start_ns,
            end_time=max(record.end_ns, record.start_ns),
            instrumentation_scope=self._scope,
        )

    def shutdown(self) -> None:
        """Exports what is queued and stops the export threads."""
        for processor in self._processors:
            processor.shutdown()  # type: ignore[no-untyped-call]
