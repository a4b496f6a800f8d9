"""Spans of unary gRPC calls, named and described as OpenTelemetry's conventions for RPC have it, on either side of the wire.

A call that its caller spoiled (INVALID_ARGUMENT, CANCELLED, ...) has its status code and is no error on either side: whether a trace counts
as failed must not be a client's to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from libs.clock import Clock
from libs.errors import TokenloomError
from libs.telemetry.tracing import SpanRecord, TraceParent, Tracer, new_span_id

Metadata = tuple[tuple[str, str], ...]
_S = grpc.StatusCode
FAILURES = frozenset((_S.UNKNOWN, _S.DEADLINE_EXCEEDED, _S.UNIMPLEMENTED, _S.INTERNAL, _S.UNAVAILABLE, _S.DATA_LOSS))


@dataclass(slots=True)
class Call:
    """A call in progress. `metadata` carries its context; what is put into `attributes` until it ends is told with it."""

    metadata: Metadata
    attributes: dict[str, AttributeValue] = field(default_factory=dict)


def address_attributes(address: str) -> dict[str, AttributeValue]:
    """`server.address` and `server.port` of "host:port", "[v6]:port", "unix:/path" or a gRPC target with a scheme."""
    if address.startswith("unix:"):
        return {"server.address": address.removeprefix("unix:"), "network.transport": "unix"}
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not host or not port.isdigit():
        return {"server.address": address}
    return {"server.address": host.strip("[]"), "server.port": int(port)}


def metadata_of(context: TraceParent) -> Metadata:
    """The W3C context as gRPC metadata."""
    state = (("tracestate", context.state),) if context.state else ()
    return (("traceparent", str(context)), *state)


def parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceParent | None:
    """The caller's context; None where it told none."""
    found = {key: value for key, value in metadata or () if isinstance(value, str)}
    return TraceParent.parse(found.get("traceparent", ""), found.get("tracestate", ""))


@contextmanager
def client_call(tracer: Tracer, clock: Clock, method: str, address: str, parent: TraceParent | None) -> Iterator[Call]:
    """One attempt of a call of `method` ("package.Service/Method") at `address`: a CLIENT span when it is over, however it ended."""
    if parent is None:
        yield Call(())
        return
    own = parent.child(new_span_id())
    call = Call(metadata_of(own), address_attributes(address))
    with _recorded(tracer, clock, method, SpanKind.CLIENT, own, parent, call):
        yield call


@contextmanager
def server_call(tracer: Tracer, clock: Clock, method: str, parent: TraceParent | None) -> Iterator[Call]:
    """The serving of a call: a SERVER span below its caller's when it is over; none where the caller does not trace."""
    if parent is None:
        yield Call(())
        return
    own = parent.child(new_span_id())
    call = Call(metadata_of(own))
    with _recorded(tracer, clock, method, SpanKind.SERVER, own, parent, call):
        yield call


@contextmanager
def _recorded(
    tracer: Tracer, clock: Clock, method: str, kind: SpanKind, own: TraceParent, parent: TraceParent, call: Call
) -> Iterator[None]:
    began, status, problem = clock.unix_ns(), _S.OK, ""
    try:
        yield
    except asyncio.CancelledError:
        status = _S.CANCELLED
        raise
    except Exception as error:
        status, problem = _outcome(error)
        call.attributes["error.type"] = error.code.spec.label if isinstance(error, TokenloomError) else status.name
        raise
    finally:
        attributes: dict[str, Any] = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": status.name,
            **call.attributes,
        }
        tracer.emit(
            SpanRecord(
                name=method,
                context=own,
                parent_id=parent.span_id,
                start_ns=began,
                end_ns=clock.unix_ns(),
                attributes=attributes,
                kind=kind,
                error=problem if status in FAILURES else None,
                remote_parent=kind is SpanKind.SERVER,
            )
        )


def _outcome(error: Exception) -> tuple[grpc.StatusCode, str]:
    match error:
        case TokenloomError():
            return error.code.spec.grpc_status, error.message
        case grpc.RpcError():
            return error.code(), error.details() or error.code().name
        case _:
            return _S.UNKNOWN, repr(error)
