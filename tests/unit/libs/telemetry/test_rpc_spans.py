"""A gRPC call's span on either side: its name and attributes, and what counts as a failure."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from libs.clock import ManualClock
from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.rpc_spans import address_attributes, client_call, metadata_of, parent_of, server_call
from libs.telemetry.tracing import TraceParent, Tracer

METHOD = "package.v1.Service/Call"
PARENT = TraceParent(7, 8, state="vendor=1")


class Broken(grpc.RpcError):
    """A call that its peer failed."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "it said so"


def recorded(side, error: BaseException | None = None, parent: TraceParent | None = PARENT):
    """The span of a call that ends with `error`, if there is one."""
    exporter = InMemorySpanExporter()
    tracer = Tracer("gateway", "g", exporters=[exporter])
    raised = None
    try:
        with side(tracer, parent) as call:
            call.attributes["tokenloom.attempt"] = 1
            if error is not None:
                raise error
    except BaseException as caught:
        raised = caught
    assert raised is error, "nothing is swallowed and nothing is made up"
    tracer.shutdown()
    return next(iter(exporter.get_finished_spans()), None)


def client(tracer, parent):
    return client_call(tracer, ManualClock(), METHOD, "tokenizer:7001", parent)


def server(tracer, parent):
    return server_call(tracer, ManualClock(), METHOD, parent)


@pytest.mark.parametrize(("side", "kind"), [(client, SpanKind.CLIENT), (server, SpanKind.SERVER)])
def test_a_call_is_one_span_below_its_caller(side, kind):
    span = recorded(side)
    assert (span.name, span.kind, span.parent.span_id, span.context.trace_id) == (METHOD, kind, 8, 7)
    assert span.parent.is_remote == (kind is SpanKind.SERVER)
    told = {name: span.attributes[name] for name in ("rpc.system.name", "rpc.method", "rpc.response.status_code", "tokenloom.attempt")}
    assert told == {"rpc.system.name": "grpc", "rpc.method": METHOD, "rpc.response.status_code": "OK", "tokenloom.attempt": 1}
    assert span.attributes.get("server.address") == ("tokenizer" if kind is SpanKind.CLIENT else None)


@pytest.mark.parametrize("side", [client, server])
@pytest.mark.parametrize(
    ("error", "status", "failed"),
    [
        (Broken(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE", True),
        (Broken(grpc.StatusCode.INVALID_ARGUMENT), "INVALID_ARGUMENT", False),
        (TokenloomError(ErrorCode.EMPTY_PROMPT, "empty"), "INVALID_ARGUMENT", False),
        (TokenloomError(ErrorCode.INTERNAL, "broken"), "INTERNAL", True),
        (asyncio.CancelledError(), "CANCELLED", False),
        (ZeroDivisionError(), "UNKNOWN", True),
    ],
)
def test_only_what_its_caller_did_not_spoil_is_a_failure(side, error, status, failed):
    span = recorded(side, error)
    assert span.attributes["rpc.response.status_code"] == status
    assert span.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)


@pytest.mark.parametrize("side", [client, server])
def test_without_a_trace_there_is_no_span(side):
    assert recorded(side, parent=None) is None


def test_the_context_travels_with_its_state():
    assert parent_of(metadata_of(PARENT)) == PARENT
    assert parent_of(metadata_of(TraceParent(7, 8))) == TraceParent(7, 8)
    assert parent_of([("traceparent", b"bytes"), ("other", "x")]) is None
    assert parent_of(None) is None


@pytest.mark.parametrize(
    ("address", "attributes"),
    [
        ("tokenizer:7001", {"server.address": "tokenizer", "server.port": 7001}),
        ("dns:///envoy:7000", {"server.address": "envoy", "server.port": 7000}),
        ("[::1]:7001", {"server.address": "::1", "server.port": 7001}),
        ("unix:/run/t.sock", {"server.address": "/run/t.sock", "network.transport": "unix"}),
        ("somewhere", {"server.address": "somewhere"}),
    ],
)
def test_addresses_are_told_by_host_and_port(address, attributes):
    assert address_attributes(address) == attributes
