"""Spans made by hand: built when their stage is over, from instants the service kept anyway, with ids chosen in advance.

Library instrumentation would make a span per SSE chunk and an endless one per stream. Here the hot path only remembers
nanoseconds; when a stage ends, `Tracer.emit` builds an OpenTelemetry ReadableSpan and hands it to one pipe per receiver
(span_export.py), which exports over OTLP in a thread of its own. A span id can be chosen before its span exists
(`new_span_id`), so that a child in another process can name its parent while the parent is still running.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry

from libs.telemetry.otel_environment import ExportSettings, read_environment
from libs.telemetry.span_export import LostSpans, SpanPipe, close_all

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


def log_ids(context: TraceParent) -> dict[str, str]:
    """The fields by which a log line leads to its trace, and to the span it belongs to."""
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


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
    """Exports the spans of one process. Without endpoints and exporters it drops them at the cost of one comparison.

    Spans go to each of `endpoints` (host:port, unix:/path, http:// or https://), to `exporters`, and to the endpoint of `settings`.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        endpoints: Sequence[str] = (),
        exporters: Sequence[SpanExporter] = (),
        *,
        settings: ExportSettings = ExportSettings(),  # noqa: B008  it is frozen
    ) -> None:
        self._settings = settings
        self._resource = _resource(service, instance)
        self._scope = InstrumentationScope("tokenloom", version("tokenloom"))
        self._pipes: list[SpanPipe] = []
        if not settings.disabled:
            named = [endpoint for endpoint in endpoints if endpoint != settings.endpoint]
            self._pipes += [SpanPipe(exporter, type(exporter).__name__, settings) for exporter in exporters]
            self._pipes += [SpanPipe(_otlp(endpoint, settings), endpoint, settings) for endpoint in named]
            if settings.endpoint is not None:
                self._pipes.append(SpanPipe(_otlp(None, settings), settings.endpoint, settings))

    @classmethod
    def of_process(cls, service: str, instance: str, endpoints: Sequence[str]) -> Tracer:
        """The tracer that a service's flags and the OTEL_* variables ask for. Raises TokenloomError that names the variable."""
        return cls(service, instance, endpoints, settings=read_environment())

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self._pipes)

    def count_in(self, registry: CollectorRegistry) -> None:
        """Adds the count of lost spans to a service's metrics."""
        registry.register(LostSpans(self._pipes))

    def begin(self, parent: TraceParent | None) -> TraceParent:
        """The context of a new span for a request from outside: in its caller's trace, or the root of a new one.

        Whether it is recorded is the sampler's decision (OTEL_TRACES_SAMPLER); by default a caller's own decision is kept, and all else is.
        """
        fresh = TraceParent.new(sampled=self.enabled)
        if not self.enabled:
            return fresh if parent is None else parent.child(fresh.span_id)
        trace_id = fresh.trace_id if parent is None else parent.trace_id
        context = None if parent is None else set_span_in_context(NonRecordingSpan(_span_context(parent, remote=True)))
        sampled = self._settings.sampler.should_sample(context, trace_id, "request").decision is Decision.RECORD_AND_SAMPLE
        return TraceParent(trace_id, fresh.span_id, sampled, "" if parent is None else parent.state)

    def emit(self, record: SpanRecord) -> None:
        """Queues a finished span for export; spans of unsampled traces are dropped. Never blocks."""
        if not self._pipes or not record.context.sampled:
            return
        span = self._readable(record)
        for pipe in self._pipes:
            pipe.offer(span)

    def _readable(self, record: SpanRecord) -> ReadableSpan:
        own = record.context
        return ReadableSpan(
            name=record.name,
            context=_span_context(own),
            parent=_span_context(own.child(record.parent_id), remote=record.remote_parent) if record.parent_id else None,
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
        """Exports what is queued and stops the export threads; returns within 2.5 s whatever the collectors do."""
        close_all(self._pipes)


def _span_context(context: TraceParent, *, remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return SpanContext(context.trace_id, context.span_id, remote, flags, state)


def _resource(service: str, instance: str) -> Resource:
    """Who speaks. What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins over our own names."""
    own = {
        "service.name": f"tokenloom-{service}",
        "service.namespace": "tokenloom",
        "service.version": version("tokenloom"),
        "service.instance.id": instance,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _otlp(endpoint: str | None, settings: ExportSettings) -> OTLPSpanExporter:
    """The exporter to `endpoint`; None: to the one of the environment, by whose variables the SDK decides about TLS.

    Headers and certificates of the environment are used for either.
    """
    insecure = None if endpoint is None else not endpoint.startswith("https")
    return OTLPSpanExporter(
        endpoint=endpoint or settings.endpoint, insecure=insecure, timeout=settings.timeout_seconds, compression=settings.compression
    )
