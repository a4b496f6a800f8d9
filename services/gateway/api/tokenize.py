"""POST /tokenize and /detokenize, as vLLM has them: what a prompt is to the model, and back. They need a tokenizer and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from opentelemetry.util.types import AttributeValue
from starlette.types import Receive, Scope, Send

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import log_ids
from services.gateway.api.checks import UINT32, invalid
from services.gateway.api.decode import decode_body
from services.gateway.api.endpoint import new_record, read_body, require_json
from services.gateway.api.errors import error_body, error_headers
from services.gateway.api.message_fields import chat_prompt
from services.gateway.api.models import resolve_model
from services.gateway.api.policy import Policy
from services.gateway.api.requests import ChatRequest, Message
from services.gateway.connection import ClientGone, Connection, Headers, SlowReader
from services.gateway.endings import error_of_cancel
from services.gateway.http_attributes import http_attributes
from services.gateway.mesh import Mesh
from services.gateway.quota import Visit, visit_of
from services.gateway.record import RequestRecord
from services.gateway.request_id import HEADER
from services.gateway.tickets import CancelReason
from services.gateway.tools import Tool
from tokenloom.tokenizer.v1 import tokenizer_pb2

_log = get_logger("gateway.api")


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: `prompt`, or `messages` and what belongs to them. `add_special_tokens` is true for a prompt that is silent
    about it and false for messages, whose template has them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct):
    """Response of POST /tokenize. `max_model_len` is null until a worker has attached; `token_strs` are the vocabulary's own names."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(Struct):
    """Response of POST /detokenize: the text, special tokens included."""

    prompt: str


@dataclass(frozen=True, slots=True)
class TextApi:
    """What differs between the two. `read` makes a call of the body: it checks at once and works when it is awaited.

    Its arguments are the body, the mesh, the request's record and its limit in seconds (None: the tokenizer client's own).
    """

    route: str
    operation: str
    read: Callable[[bytearray, Mesh, RequestRecord, float | None], Awaitable[Struct]]


async def _tokenize(body: bytearray, mesh: Mesh, record: RequestRecord, timeout: float | None) -> TokenizeResponse:
    request, encode = await read_body(body, lambda: _read_tokenize(body, mesh, record.request_id))
    record.parsed_ns = mesh.clock.unix_ns()
    trace = record.context.child(record.tokenize_span)
    try:
        encoded = await mesh.tokenizers.encode(encode, timeout=timeout, trace=trace)
    except TokenloomError as error:
        if error.code is not ErrorCode.EMPTY_PROMPT or request.prompt is None:
            raise
        encoded = tokenizer_pb2.EncodeResponse()  # nothing can be generated from it, but it can be counted
    facts = mesh.session.facts
    ids = unpack_ids(encoded.token_ids)
    return TokenizeResponse(
        count=len(ids),
        max_model_len=facts.max_model_len if facts is not None else None,
        tokens=ids,
        token_strs=list(encoded.tokens) if request.return_token_strs else None,
    )


def _read_tokenize(body: bytearray, mesh: Mesh, label: str) -> tuple[TokenizeRequest, tokenizer_pb2.EncodeRequest]:
    request = decode_body(body, TokenizeRequest)
    resolve_model(mesh.config, request.model)
    return request, _encode_request(request, label, Policy.of(mesh.config))


def _encode_request(request: TokenizeRequest, label: str, policy: Policy) -> tokenizer_pb2.EncodeRequest:
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise invalid(f"{name} belongs to messages, and this request has a prompt", name)
        encode = tokenizer_pb2.EncodeRequest(text=request.prompt or "", request_label=label)
    else:
        chat = ChatRequest(
            messages=request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        encode = chat_prompt(chat, msgspec.json.encode(request.tools) if request.tools else b"", label, policy).request
    if request.add_special_tokens is not None:
        added = tokenizer_pb2.SPECIAL_TOKENS_ADD if request.add_special_tokens else tokenizer_pb2.SPECIAL_TOKENS_NONE
        encode.special_tokens = added
    encode.want_tokens = request.return_token_strs is True
    return encode


def _read_detokenize(body: bytearray, mesh: Mesh) -> bytes:
    request = decode_body(body, DetokenizeRequest)
    resolve_model(mesh.config, request.model)
    for index, token_id in enumerate(request.tokens):
        if token_id not in UINT32:
            raise invalid(f"tokens[{index}] must be a token id", f"tokens[{index}]")
    return pack_ids(request.tokens)


async def _detokenize(body: bytearray, mesh: Mesh, record: RequestRecord, timeout: float | None) -> DetokenizeResponse:
    tokens = await read_body(body, lambda: _read_detokenize(body, mesh))
    record.parsed_ns = mesh.clock.unix_ns()
    try:
        return DetokenizeResponse(await mesh.tokenizers.decode(tokens, timeout=timeout))
    except TokenloomError as error:
        if error.param == "prompt":  # the tokenizer knows ids, not what the API calls them
            error.param = "tokens"
        raise


TOKENIZE = TextApi("/tokenize", "tokenize", _tokenize)
DETOKENIZE = TextApi("/detokenize", "detokenize", _detokenize)


class TextEndpoint:
    """An ASGI application for one of the two."""

    def __init__(self, mesh: Mesh, api: TextApi) -> None:
        self._mesh, self._api = mesh, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        config = self._mesh.config
        connection = Connection(scope, receive, send, max_body_bytes=config.max_body_bytes, slow_reader_timeout=config.slow_reader_timeout)
        await _TextExchange(self._mesh, self._api, connection, http_attributes(scope), visit_of(scope)).run()


class _TextExchange:
    """One request and its answer. It counts as open, so that a gateway that leaves lets it end."""

    def __init__(self, mesh: Mesh, api: TextApi, connection: Connection, http: Mapping[str, AttributeValue], visit: Visit | None) -> None:
        self._mesh, self._api, self._connection, self._visit = mesh, api, connection, visit
        named = {**http, "tokenloom.tenant": visit.key.name} if visit is not None else http
        self._record = new_record(mesh, connection, named, route=api.route, operation=api.operation, id_prefix=api.operation)
        context, request_id = self._record.context, self._record.request_id
        self._headers: Headers = [(HEADER, request_id.encode()), (b"traceparent", str(context).encode())]
        structlog.contextvars.bind_contextvars(request_id=request_id, **log_ids(context))
        self._interrupted: asyncio.Future[CancelReason.ValueType] = asyncio.get_running_loop().create_future()

    def interrupt(self, reason: CancelReason.ValueType) -> None:
        """See services.gateway.mesh.OpenRequest."""
        if not self._interrupted.done():
            self._interrupted.set_result(reason)

    async def run(self) -> None:
        """Serves, and accounts for it whatever happened."""
        record, connection, mesh = self._record, self._connection, self._mesh
        mesh.opened(self)
        try:
            await self._answer()
        except (ClientGone, SlowReader):
            record.error = record.error or error_of_cancel(CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED)
        finally:
            record.status = record.status or 499
            connection.close()
            mesh.closed(self)
            record.finish(mesh.clock, mesh.metrics, mesh.tracer)
            structlog.contextvars.clear_contextvars()

    async def _answer(self) -> None:
        try:
            answer = await self._work()
        except TokenloomError as error:
            await self._fail(error)
        except ClientGone:
            raise
        except Exception:
            _log.exception("a request failed by a fault of this server")
            await self._fail(TokenloomError(ErrorCode.INTERNAL, "The server failed; its log has the details"))
        else:
            await self._respond(200, msgspec.json.encode(answer))

    async def _work(self) -> Struct:
        connection, mesh, record = self._connection, self._mesh, self._record
        require_json(connection)
        body = await connection.body()
        record.started_ns, record.started_mono = mesh.clock.unix_ns(), mesh.clock.monotonic_ns()
        mesh.refuse_when_draining()
        connection.watch(lambda: self.interrupt(CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED))
        if self._visit is not None:
            await self._visit.admit(0)  # it counts among the key's requests; nothing is generated
        work = asyncio.ensure_future(self._api.read(body, mesh, record, mesh.config.request_timeout or None))
        waited: set[asyncio.Future[Any]] = {work, self._interrupted}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise error_of_cancel(self._interrupted.result())
            answer = work.result()
        finally:
            work.cancel()
        record.tokenized_ns = mesh.clock.unix_ns()
        return answer

    async def _fail(self, error: TokenloomError) -> None:
        self._record.error = error
        if self._connection.gone:
            raise ClientGone
        await self._respond(error.code.spec.http_status, error_body(error), error_headers(error))

    async def _respond(self, status: int, body: bytes, headers: Headers = ()) -> None:
        self._record.status = status
        await self._connection.respond(status, body, [*self._headers, *headers])
