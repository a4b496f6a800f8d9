"""POST endpoints that generate: from the connection to the last byte, every error on its way out in OpenAI's shape."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog
from opentelemetry.util.types import AttributeValue
from starlette.types import Receive, Scope, Send

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import TraceParent, log_ids
from services.gateway.api import sse
from services.gateway.api.errors import error_body, error_headers, error_struct
from services.gateway.api.writers import Form, Writer
from services.gateway.connection import ClientGone, Connection, Headers, SlowReader
from services.gateway.endings import error_of_cancel
from services.gateway.generate import Generation
from services.gateway.http_attributes import http_attributes
from services.gateway.mesh import Mesh
from services.gateway.quota import Visit, visit_of
from services.gateway.record import RequestRecord
from services.gateway.request_id import HEADER, request_id_of
from services.gateway.streamer import Change, joined
from services.gateway.tickets import CancelReason
from services.gateway.wanted import Wanted

# Characters; what the W3C recommendation asks everybody to carry.
_MAX_TRACESTATE = 512

# Positions whose log-probabilities are written on the loop (7 us each with 5 alternatives, 25 with 20). Those of a whole response or of a
# prompt may take a second, for which everybody's streams would stand still.
_LISTED_ON_LOOP = 64
# Bytes of a body that takes some milliseconds to read and check, whatever is in it.
_READ_ON_LOOP = 64 * 1024

# On a refusal: nothing of the request was begun here, and another gateway may well serve it. Envoy tries it there and takes the
# header off (deploy/envoy/envoy.yaml); the same errors later on do not carry it, for then the request may be running.
NOT_BEGUN = (b"x-tokenloom-not-begun", b"1")
_ANOTHER_MAY_SERVE = (ErrorCode.DRAINING, ErrorCode.SCHEDULER_UNAVAILABLE)

_log = get_logger("gateway.api")
ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True)
class Api:
    """What differs between the generating endpoints. `read` makes Wanted of body, mesh and x-request-id; `writer` writes the response."""

    route: str
    operation: str
    id_prefix: str
    read: Callable[[bytearray, Mesh, str], Wanted]
    writer: Callable[[Form, Mesh], Writer]


class GenerationEndpoint:
    """An ASGI application for one of the APIs."""

    def __init__(self, mesh: Mesh, api: Api) -> None:
        self._mesh, self._api = mesh, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        config = self._mesh.config
        connection = Connection(scope, receive, send, max_body_bytes=config.max_body_bytes, slow_reader_timeout=config.slow_reader_timeout)
        await _Exchange(self._mesh, self._api, connection, http_attributes(scope), visit_of(scope)).run()


class _Exchange:
    """One request and its response."""

    def __init__(self, mesh: Mesh, api: Api, connection: Connection, http: Mapping[str, AttributeValue], visit: Visit | None) -> None:
        self._mesh, self._api, self._connection, self._visit = mesh, api, connection, visit
        named = {**http, "tokenloom.tenant": visit.key.name} if visit is not None else http
        self._record = new_record(mesh, connection, named, route=api.route, operation=api.operation, id_prefix=api.id_prefix)
        context, request_id = self._record.context, self._record.request_id
        self._headers: Headers = [(HEADER, request_id.encode()), (b"traceparent", str(context).encode())]
        structlog.contextvars.bind_contextvars(request_id=request_id, **log_ids(context))
        self._generation: Generation | None = None

    async def run(self) -> None:
        """Serves, and accounts for it whatever happened."""
        record, connection = self._record, self._connection
        try:
            await self._answer()
        except (ClientGone, SlowReader):
            pass
        finally:
            record.status = record.status or (200 if connection.started else 499)
            if self._generation is not None:
                await self._generation.close()
            connection.close()
            record.finish(self._mesh.clock, self._mesh.metrics, self._mesh.tracer)
            structlog.contextvars.clear_contextvars()

    async def _answer(self) -> None:
        try:
            await self._serve_or_fail()
        except ClientGone:
            self._record.error = error_of_cancel(CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED)
            self._interrupt(CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED)
            raise
        except SlowReader:
            self._record.error = error_of_cancel(CancelReason.CANCEL_REASON_SLOW_READER)
            self._interrupt(CancelReason.CANCEL_REASON_SLOW_READER)
            await self._connection.cut()
            raise
        except asyncio.CancelledError:
            self._interrupt(CancelReason.CANCEL_REASON_SHUTDOWN)
            raise

    async def _serve_or_fail(self) -> None:
        try:
            await self._serve()
        except TokenloomError as error:
            await self._fail(error)
        except (ClientGone, SlowReader):
            raise
        except Exception:
            _log.exception("a request failed by a fault of this server")
            await self._fail(TokenloomError(ErrorCode.INTERNAL, "The server failed; its log has the details"))

    def _interrupt(self, reason: CancelReason.ValueType) -> None:
        if self._generation is not None:
            self._generation.interrupt(reason)

    async def _serve(self) -> None:
        connection, mesh, record = self._connection, self._mesh, self._record
        require_json(connection)
        body = await connection.body()
        # The trace is about the server: a client's slow upload is not part of it.
        record.started_ns, record.started_mono = mesh.clock.unix_ns(), mesh.clock.monotonic_ns()
        mesh.refuse_when_draining()
        wanted = record.wanted = await read_body(body, lambda: self._api.read(body, mesh, record.request_id))
        mesh.refuse_when_draining()  # it may have begun meanwhile
        generation = self._generation = Generation(mesh, wanted, record, self._visit)
        connection.watch(lambda: generation.interrupt(CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED))
        await generation.prepare()
        generation.submit()
        form = Form(wanted, record.response_id, record.started_ns // 1_000_000_000, generation.table, generation.choices)
        writer = self._api.writer(form, mesh)
        if wanted.stream:
            await self._stream(generation, writer, wanted)
        else:
            await self._respond(200, await _collect(generation, writer))

    async def _stream(self, generation: Generation, writer: Writer, wanted: Wanted) -> None:
        stream = sse.EventStream(self._connection, self._headers, self._mesh.config.sse_keep_alive)
        changes = await stream.wait(generation.changes)
        data = b"".join(sse.event(chunk) for chunk in writer.opening())
        while True:
            data += await _written(changes, functools.partial(_events, writer, changes))
            if generation.ended:
                break
            await stream.write(data)
            changes, data = await stream.wait(generation.changes), b""
        if wanted.include_usage:
            data += sse.event(writer.usage_chunk())
        await stream.end(data)

    async def _fail(self, error: TokenloomError) -> None:
        """Tells the client, in the stream if it has begun, and remembers."""
        self._record.error = error
        if error.code is ErrorCode.CANCELLED and self._connection.gone:
            raise ClientGone
        if self._connection.started:
            await self._connection.write(sse.event(error_struct(error)) + sse.DONE)
            await self._connection.end()
            return
        headers = error_headers(error)
        if not (self._generation is not None and self._generation.begun) and error.code in _ANOTHER_MAY_SERVE:
            headers.append(NOT_BEGUN)
        await self._respond(error.code.spec.http_status, error_body(error), headers)

    async def _respond(self, status: int, body: bytes, headers: Headers = ()) -> None:
        self._record.status = status
        await self._connection.respond(status, body, [*self._headers, *headers])


def _events(writer: Writer, changes: list[Change]) -> bytes:
    chunks = (writer.chunk(change) for change in changes)
    return b"".join(sse.event(chunk) for chunk in chunks if chunk is not None)


async def _collect(generation: Generation, writer: Writer) -> bytes:
    """Reads until every choice has ended; the response's JSON."""
    found: list[list[Change]] = [[] for _ in generation.choices]
    while not generation.ended:
        for change in await generation.changes():
            found[change.index].append(change)
    whole = [joined(changes) for changes in found]
    return await _written(whole, lambda: msgspec.json.encode(writer.whole(whole)))


async def _written(changes: list[Change], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of the changes: beside the loop, where they list many log-probabilities."""
    listed = sum(len(change.logprobs or ()) + len(change.prompt_logprobs or ()) for change in changes)
    return write() if listed <= _LISTED_ON_LOOP else await asyncio.to_thread(write)


async def read_body(body: bytearray, read: Callable[[], ReadT]) -> ReadT:
    """What `read` makes of a body: beside the loop, where it is long. It must only read and check."""
    return read() if len(body) <= _READ_ON_LOOP else await asyncio.to_thread(read)


def require_json(connection: Connection) -> None:
    """Raises TokenloomError UNSUPPORTED_MEDIA_TYPE for a body that is not said to be plain JSON."""
    # Also what keeps web pages from posting here without asking: a form cannot send this type across origins.
    kind = connection.header(b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise TokenloomError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json")
    coding = connection.header(b"content-encoding").strip().lower()
    if coding not in ("", "identity"):
        raise TokenloomError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "Content-Encoding is not supported: send the body as it is")


def new_record(
    mesh: Mesh, connection: Connection, http: Mapping[str, AttributeValue], *, route: str, operation: str, id_prefix: str
) -> RequestRecord:
    """The record of a request that has just arrived: its ids, and its place in the client's trace."""
    request_id = request_id_of(connection.header(HEADER))
    state = connection.header(b"tracestate")
    parent = TraceParent.parse(connection.header(b"traceparent"), state if len(state) <= _MAX_TRACESTATE else "")
    return RequestRecord(
        operation=operation,
        http=http,
        route=route,
        request_id=request_id,
        response_id=f"{id_prefix}-{request_id}",
        context=mesh.tracer.begin(parent),
        parent_id=0 if parent is None else parent.span_id,
        started_ns=mesh.clock.unix_ns(),
        started_mono=mesh.clock.monotonic_ns(),
    )
