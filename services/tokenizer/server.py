"""The gRPC face of the tokenizer service, and its life from loading to drained."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import structlog
from opentelemetry.util.types import AttributeValue

from libs.blocks import BLOCK_SIZE
from libs.clock import Clock, SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.packing import count_ids, unpack_ids
from libs.rpc import abort, listen, new_server
from libs.telemetry.logs import get_logger
from libs.telemetry.metrics import serve_metrics
from libs.telemetry.rpc_spans import parent_of, server_call
from libs.telemetry.tracing import Tracer, log_ids
from libs.text.build import build_text_table
from libs.text.decoding import IncrementalText
from libs.text.table import TextTable
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encoder import check_range, load_tokenizer
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.pool import EncoderPool
from services.tokenizer.templates import tool_support
from tokenloom.common.v1 import common_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

# Ids decoded between two looks at the loop: about a millisecond.
_DECODE_SLICE = 2048
_ENCODE = "tokenloom.tokenizer.v1.TokenizerService/Encode"

_log = get_logger("tokenizer")
_Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """See tokenizer.proto. `table` and `model` are of the same directory that the pool's processes loaded."""

    def __init__(
        self, model: ModelDirectory, table: TextTable, pool: EncoderPool, *, tracer: Tracer, clock: Clock, metrics: TokenizerMetrics
    ) -> None:
        self._table, self._pool = table, pool
        self._tracer, self._clock, self._metrics = tracer, clock, metrics
        self._vocab_size = model.vocab_size
        self._table_message = table.to_proto()
        tools = tool_support(model.tool_template or model.chat_template)
        self._description = tokenizer_pb2.DescribeResponse(
            fingerprints=common_pb2.Fingerprints(tokenizer=table.fingerprint),
            vocab_size=table.vocab_size,
            has_chat_template=model.chat_template is not None,
            block_size=BLOCK_SIZE,
            text_table_verified=table.verified,
            tool_format=tools.format,
            template_knows_tools=tools.rendered,
        )

    async def Describe(self, request: tokenizer_pb2.DescribeRequest, context: _Context) -> tokenizer_pb2.DescribeResponse:
        """See tokenizer.proto."""
        return self._description

    async def GetTextTable(self, request: tokenizer_pb2.GetTextTableRequest, context: _Context) -> tokenizer_pb2.GetTextTableResponse:
        """See tokenizer.proto."""
        return self._table_message

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: _Context) -> tokenizer_pb2.EncodeResponse:
        """See tokenizer.proto."""
        kind = request.WhichOneof("input") or "none"
        parent = parent_of(context.invocation_metadata())
        try:
            with (
                structlog.contextvars.bound_contextvars(**({} if parent is None else log_ids(parent))),
                server_call(self._tracer, self._clock, _ENCODE, parent) as span,
            ):
                span.attributes["tokenloom.input"] = kind
                response = await self._pool.encode(request)
                span.attributes |= _encode_attributes(response)
        except TokenloomError as error:
            self._metrics.requests.labels(kind=kind, outcome=error.code.spec.label).inc()
            await abort(context, error)
        except asyncio.CancelledError:
            self._metrics.requests.labels(kind=kind, outcome=ErrorCode.CANCELLED.spec.label).inc()
            raise
        self._metrics.requests.labels(kind=kind, outcome="ok").inc()
        self._metrics.tokens.inc(count_ids(response.token_ids))
        return response

    async def Decode(self, request: tokenizer_pb2.DecodeRequest, context: _Context) -> tokenizer_pb2.DecodeResponse:
        """See tokenizer.proto."""
        try:
            text = await self._decode(request)
        except TokenloomError as error:
            self._metrics.requests.labels(kind="decode", outcome=error.code.spec.label).inc()
            await abort(context, error)
        self._metrics.requests.labels(kind="decode", outcome="ok").inc()
        return tokenizer_pb2.DecodeResponse(text=text)

    async def _decode(self, request: tokenizer_pb2.DecodeRequest) -> str:
        if len(request.token_ids) % 4:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{len(request.token_ids)} bytes are no whole number of 4-byte token ids")
        ids = unpack_ids(request.token_ids)
        check_range(ids, self._vocab_size)
        text = IncrementalText(self._table, skip_special_tokens=request.skip_special_tokens)
        parts = []
        for start in range(0, len(ids), _DECODE_SLICE):
            parts.append(text.push(ids[start : start + _DECODE_SLICE]))
            await asyncio.sleep(0)  # a long text must not hold up the prompts of others
        return "".join([*parts, text.finish()])


def _encode_attributes(response: tokenizer_pb2.EncodeResponse) -> dict[str, AttributeValue]:
    return {
        "tokenloom.prompt_tokens": count_ids(response.token_ids),
        "tokenloom.queue_us": response.queue_us,
        "tokenloom.render_us": response.render_us,
        "tokenloom.encode_us": response.encode_us,
    }


def encoder_command(config: TokenizerConfig) -> list[str]:
    """What starts one encoder process."""
    module = "services.tokenizer.encoder_process"
    return [sys.executable, "-m", module, config.model, str(config.tokenizer_memory_bytes), config.chat_template]


async def run(config: TokenizerConfig, stop: asyncio.Event) -> int:
    """Serves until `stop` is set, then drains; returns the exit code. Raises TokenloomError or OSError when it cannot start."""
    clock, metrics = SystemClock(), TokenizerMetrics()
    tracer = Tracer.of_process("tokenizer", config.instance, config.otlp_endpoint)
    tracer.count_in(metrics.registry)
    model = ModelDirectory(config.model, config.chat_template)
    pool = EncoderPool(
        encoder_command(config),
        size=config.tokenizer_pool_size,
        max_waiting=config.tokenizer_queue,
        time_limit=config.tokenizer_timeout,
        clock=clock,
        metrics=metrics,
    )
    table, _ = await asyncio.gather(asyncio.to_thread(_load_table, model), pool.start())
    try:
        server = new_server([tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name])
        servicer = TokenizerServicer(model, table, pool, tracer=tracer, clock=clock, metrics=metrics)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.server)
        serve_metrics(metrics.registry, config.metrics_host, config.metrics_port)
        address = await listen(server, config.listen)
        await server.set_ready(True)
        _log.info("ready", address=address, model=model.name, vocab_size=table.vocab_size, pool=config.tokenizer_pool_size)
        if not table.verified:
            _log.warning("the text table disagrees with the tokenizer's own decode: stop strings will be refused")
        await stop.wait()
        _log.info("draining", waiting=pool.waiting)
        await server.stop(config.drain_timeout)
    finally:
        await pool.close()
        await asyncio.to_thread(tracer.shutdown)
    return 0


def _load_table(model: ModelDirectory) -> TextTable:
    return build_text_table(load_tokenizer(model), model.tokenizer_fingerprint)
