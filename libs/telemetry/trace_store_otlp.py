"""OTLP/gRPC in front of the built-in trace store: the same exporter that feeds Jaeger or any collector feeds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from libs.telemetry.trace_keeping import SpanSink
from libs.telemetry.trace_store import StoredEvent, StoredSpan, TraceStoreError

MAX_EXPORT_BYTES = 16 * 1024 * 1024
# Exports that wait for the one writer; a further one gets RESOURCE_EXHAUSTED, and its exporter tries again or drops.
MAX_WAITING_EXPORTS = 16
# OTLP's instants are unsigned, SQLite's integers are not.
_MAX_INTEGER = 2**63 - 1
_KINDS = {number: name.removeprefix("SPAN_KIND_").lower() for name, number in trace_pb2.Span.SpanKind.items() if number}


def convert(resource_spans: Iterable[trace_pb2.ResourceSpans]) -> Iterator[StoredSpan]:
    """The spans of an export. One without the ids that OTLP demands is left out."""
    for group in resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield _span(span, resource)


def _span(span: trace_pb2.Span, resource: dict[str, Any]) -> StoredSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return StoredSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=str(resource.get("service.name", "unknown")),
        start_ns=min(span.start_time_unix_nano, _MAX_INTEGER),
        end_ns=min(span.end_time_unix_nano, _MAX_INTEGER),
        attributes=_attributes(span.attributes),
        events=tuple(StoredEvent(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        instance=str(resource.get("service.instance.id", "")),
        error=(span.status.message or "error") if failed else None,
        kind=_KINDS.get(span.kind, "internal"),
    )


def _attributes(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return value.bytes_value.hex()
        case None:
            return None
        case kind:
            return getattr(value, kind)


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP's TraceService.Export into a store, or what stands before one."""

    def __init__(self, store: SpanSink) -> None:
        self._store = store
        self._lock = threading.Lock()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        """See OTLP. A store that cannot be written answers UNAVAILABLE: the exporter tries again."""
        try:
            with self._lock:
                self._store.add(convert(request.resource_spans))
        except TraceStoreError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return trace_service_pb2.ExportTraceServiceResponse()


def serve_traces(store: SpanSink, address: str) -> grpc.Server:
    """Starts a receiver on `address` ("unix:/path" or "host:port"), with one thread. Raises OSError when it cannot be bound."""
    server = grpc.server(
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="otlp"),
        maximum_concurrent_rpcs=MAX_WAITING_EXPORTS,
        options=[("grpc.max_receive_message_length", MAX_EXPORT_BYTES), ("grpc.so_reuseport", 0)],
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TraceReceiver(store), server)  # type: ignore[no-untyped-call]
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    server.start()
    return server
