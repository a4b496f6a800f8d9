"""The receiver behind the exporter that the services use."""

import sqlite3
import time

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from libs.telemetry.trace_store import TraceReader, TraceStore
from libs.telemetry.trace_store_otlp import convert, serve_traces
from libs.telemetry.tracing import SpanEvent, SpanRecord, TraceParent, Tracer


@pytest.fixture
def received(tmp_path):
    """The address of a receiver, and a reader of its store."""
    store = TraceStore(tmp_path / "traces.db")
    address = f"unix:{tmp_path}/traces.sock"
    server = serve_traces(store, address)
    reader = TraceReader(tmp_path / "traces.db")
    yield address, reader
    reader.close()
    server.stop(0).wait()
    store.close()


def test_what_a_tracer_emits_is_found_in_the_store(received):
    address, reader = received
    tracer = Tracer("worker", "worker-0", endpoints=[address])
    context = TraceParent(0xABC, 0xDEF)
    attributes = {"gen_ai.response.id": "chatcmpl-1", "tokens": 3, "share": 0.5, "names": ("a", "b"), "cached": True}
    tracer.emit(SpanRecord("prefill", context, 5, 1_000, 4_000, attributes, [SpanEvent("chunk", 2_000, {"size": 2})], error="failed"))
    tracer.shutdown()
    deadline = time.monotonic() + 10
    while not (found := reader.find("chatcmpl-1")):
        assert time.monotonic() < deadline, "the span did not arrive"
        time.sleep(0.01)
    (span,) = reader.spans(found[0])
    assert (span.name, span.service, span.instance, span.error) == ("prefill", "tokenloom-worker", "worker-0", "failed")
    assert (span.span_id, span.parent_id, span.start_ns, span.end_ns) == (f"{0xDEF:016x}", f"{5:016x}", 1_000, 4_000)
    assert span.attributes == {"gen_ai.response.id": "chatcmpl-1", "tokens": 3, "share": 0.5, "names": ["a", "b"], "cached": True}
    assert [(event.name, event.unix_ns, event.attributes) for event in span.events] == [("chunk", 2_000, {"size": 2})]


def test_a_span_without_proper_ids_is_left_out_and_hostile_instants_are_clamped():
    export = trace_service_pb2.ExportTraceServiceRequest()
    spans = export.resource_spans.add().scope_spans.add().spans
    spans.add(trace_id=b"short", span_id=b"12345678")
    spans.add(trace_id=b"0123456789abcdef", span_id=b"12345678", end_time_unix_nano=2**64 - 1)
    (span,) = convert(export.resource_spans)
    assert span.end_ns == 2**63 - 1
    assert span.service == "unknown"


def test_a_store_that_cannot_be_written_answers_unavailable_so_that_the_exporter_tries_again(tmp_path):
    store = TraceStore(tmp_path / "traces.db")
    address = f"unix:{tmp_path}/traces.sock"
    server = serve_traces(store, address)
    other = sqlite3.connect(tmp_path / "traces.db")
    other.execute("DROP TABLE spans")
    other.close()
    request = trace_service_pb2.ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(trace_id=b"0123456789abcdef", span_id=b"12345678")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
        trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=10)
    server.stop(0).wait()
    store.close()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_address_that_cannot_be_bound_is_an_os_error(tmp_path):
    store = TraceStore(tmp_path / "traces.db")
    with pytest.raises(OSError, match="cannot listen on"):
        serve_traces(store, f"unix:{tmp_path}/missing/traces.sock")
    store.close()
