"""The tokenizer replicas as one: balanced by outstanding calls, retried elsewhere, a failing replica left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.rpc import connect, error_of
from libs.telemetry.logs import get_logger
from libs.telemetry.rpc_spans import client_call
from libs.telemetry.tracing import TraceParent, Tracer
from libs.text.table import TextTable, TokenClass
from services.gateway.metrics import GatewayMetrics
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

# Seconds that a replica is left alone after its first, second, ... failure in a row.
CIRCUIT_OPEN = (0.25, 0.5, 1.0, 2.0, 5.0)
# Seconds. Unary calls of the client itself (table, describe); encode calls have the request's deadline or ENCODE_TIMEOUT.
CONTROL_TIMEOUT = 10.0
ENCODE_TIMEOUT = 60.0
# Seconds between attempts to get the text table, between looks at whether it is still the one that is wanted, and between attempts of
# an encode while no replica can be reached.
TABLE_RETRY = 0.25
TABLE_LOOK = 1.0
ENCODE_RETRY = 0.1
# Nanoseconds for which calls must have failed, at least, before that counts as nobody being there.
MIN_FAILING_NS = 1_000_000_000

_ENCODE = "tokenloom.tokenizer.v1.TokenizerService/Encode"
_log = get_logger("gateway.tokenizer")
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Replica:
    """One address, its load and its circuit. Monotonic instants: since when all calls have failed, when it may be tried again.

    The address may be a balancer's, with any number of tokenizers behind it: its circuit orders, it never locks out.
    """

    address: str
    channel: grpc.aio.Channel
    stub: tokenizer_pb2_grpc.TokenizerServiceStub
    outstanding: int = 0
    failures: int = 0
    failing_since_ns: int = 0
    closed_again_ns: int = 0


class TokenizerClient:
    """Encodes through whichever replica is least busy, and keeps the text table. What comes with it: `tool_format`, how its chat template
    has calls written ("" where that is not known), `added_tokens`, texts that the tokenizer never splits, with their ids, and
    `special_tokens`, those of them that outputs leave out.

    `expected_fingerprint` says which tokenizer the workers' model wants (empty: not known yet). `patience`: seconds that an encode waits
    for a replica to come back when none can be reached; a restart is a pause then, not an error.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock,
        metrics: GatewayMetrics,
        expected_fingerprint: Callable[[], str],
        *,
        tracer: Tracer,
        patience: float = 0.0,
    ) -> None:
        self._replicas = [self._replica(address) for address in addresses]
        self._clock, self._metrics, self._expected, self._tracer = clock, metrics, expected_fingerprint, tracer
        for address in addresses:
            metrics.tokenizer_failures.labels(address=address)  # a series from the start: see metrics.py
        self._turn = 0
        self._patience_ns = round(patience * 1e9)
        self.table: TextTable | None = None
        self.tool_format = ""
        self.added_tokens: Mapping[str, int] = {}
        self.special_tokens: frozenset[str] = frozenset()

    @staticmethod
    def _replica(address: str) -> Replica:
        channel = connect(address)
        return Replica(address, channel, tokenizer_pb2_grpc.TokenizerServiceStub(channel))

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(*(replica.channel.close() for replica in self._replicas))

    @property
    def reachable(self) -> bool:
        """Whether some replica is connected or may be soon, and calls have not failed there for longer than requests wait: behind a
        balancer that is connected there may be nobody. Asking also makes idle channels connect again.
        """
        states = [replica.channel.get_state(try_to_connect=True) for replica in self._replicas]
        since = self._clock.monotonic_ns() - max(self._patience_ns, MIN_FAILING_NS)
        return any(
            state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE and (not replica.failures or replica.failing_since_ns > since)
            for replica, state in zip(self._replicas, states, strict=True)
        )

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, *, timeout: float | None, trace: TraceParent | None
    ) -> tokenizer_pb2.EncodeResponse:
        """Renders and encodes one prompt. `timeout` is in seconds (None: a minute). Each attempt is a span below `trace`.

        Raises TokenloomError: what the tokenizer refused, TOKENIZER_BUSY when every replica's queue is full, TOKENIZER_UNAVAILABLE
        when none can be reached for longer than the patience, DEADLINE_EXCEEDED.
        """
        began, attempts = self._clock.monotonic_ns(), itertools.count()
        limit_ns = began + round((ENCODE_TIMEOUT if timeout is None else timeout) * 1e9)

        async def call(replica: Replica) -> tokenizer_pb2.EncodeResponse:
            left = max((limit_ns - self._clock.monotonic_ns()) / 1e9, 0.001)
            with client_call(self._tracer, self._clock, _ENCODE, replica.address, trace) as span:
                span.attributes["tokenloom.attempt"] = next(attempts)
                response: tokenizer_pb2.EncodeResponse = await replica.stub.Encode(request, timeout=left, metadata=span.metadata)  # type: ignore[misc]
                if self.table is not None and response.tokenizer_fingerprint != self.table.fingerprint:
                    raise TokenloomError(ErrorCode.TOKENIZER_UNAVAILABLE, f"the tokenizer at {replica.address} serves another tokenizer")
            return response

        response = await self._patiently(call, min(began + self._patience_ns, limit_ns))
        self._metrics.tokenizer_call.observe((self._clock.monotonic_ns() - began) / 1e9)
        return response

    async def decode(self, token_ids: bytes, *, timeout: float | None) -> str:
        """The text of ids (little-endian uint32), special tokens included. `timeout` is in seconds (None: a minute).

        Raises TokenloomError as `encode` does, INVALID_REQUEST for an id that is out of range.
        """
        began = self._clock.monotonic_ns()
        limit_ns = began + round((ENCODE_TIMEOUT if timeout is None else timeout) * 1e9)
        request = tokenizer_pb2.DecodeRequest(token_ids=token_ids)

        async def call(replica: Replica) -> str:
            left = max((limit_ns - self._clock.monotonic_ns()) / 1e9, 0.001)
            response: tokenizer_pb2.DecodeResponse = await replica.stub.Decode(request, timeout=left)  # type: ignore[misc]
            return response.text

        return await self._patiently(call, min(began + self._patience_ns, limit_ns))

    async def _patiently(self, call: Callable[[Replica], Awaitable[_T]], until_ns: int) -> _T:
        """Makes a call; while no replica can be reached, tries again as soon as one connects, until `until_ns` (monotonic)."""
        while True:
            try:
                return await self._anywhere(call)
            except TokenloomError as error:
                if error.code is not ErrorCode.TOKENIZER_UNAVAILABLE or self._clock.monotonic_ns() >= until_ns:
                    raise
            await asyncio.sleep(ENCODE_RETRY)  # a replica may be connected and still not the one that is wanted
            await self._some_connection((until_ns - self._clock.monotonic_ns()) / 1e9)

    async def _some_connection(self, seconds: float) -> None:
        """Returns when some replica is connected, or after `seconds`."""
        waits = [asyncio.ensure_future(replica.channel.channel_ready()) for replica in self._replicas]
        try:
            await asyncio.wait(waits, timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def load_table(self) -> None:
        """Fetches the text table until it is the one of the workers' model, and again when that changes. Runs until cancelled."""
        while True:
            wanted = self._expected()
            if self.table is None or (wanted and wanted != self.table.fingerprint):
                await self._try_table(wanted)
            elif all(replica.failures for replica in self._replicas):
                await self._look()
            wanted = self._expected()
            await asyncio.sleep(TABLE_LOOK if self.table is not None and wanted in ("", self.table.fingerprint) else TABLE_RETRY)

    async def _look(self) -> None:
        """Asks whether somebody is there again: while none is, no request comes that would find out."""

        async def call(replica: Replica) -> None:
            await replica.stub.Describe(tokenizer_pb2.DescribeRequest(), timeout=CONTROL_TIMEOUT)  # type: ignore[misc]

        with contextlib.suppress(TokenloomError):
            await self._anywhere(call)

    async def _try_table(self, wanted: str) -> None:
        async def call(replica: Replica) -> tuple[TextTable, str]:
            message: tokenizer_pb2.GetTextTableResponse = await replica.stub.GetTextTable(  # type: ignore[misc]
                tokenizer_pb2.GetTextTableRequest(), timeout=CONTROL_TIMEOUT
            )
            described: tokenizer_pb2.DescribeResponse = await replica.stub.Describe(  # type: ignore[misc]
                tokenizer_pb2.DescribeRequest(), timeout=CONTROL_TIMEOUT
            )
            # 50 thousand slices: off the loop, which is serving other requests when a tokenizer is exchanged.
            return await asyncio.to_thread(TextTable.from_proto, message), described.tool_format

        try:
            table, tool_format = await self._anywhere(call)
        except (TokenloomError, ValueError) as error:
            _log.debug("the text table is not there yet", error=str(error))
            return
        if self.table is None or table.fingerprint == wanted:
            self.table, self.tool_format = table, tool_format
            self.added_tokens = _added_tokens(table, TokenClass.SPECIAL, TokenClass.ADDED)
            self.special_tokens = frozenset(_added_tokens(table, TokenClass.SPECIAL))
            _log.info("text table loaded", tokenizer=table.fingerprint[:12], vocab_size=table.vocab_size, verified=table.verified)

    async def _anywhere(self, call: Callable[[Replica], Awaitable[_T]]) -> _T:
        """Makes a call at the best replica; tries the others, each once, when that one is unreachable or full."""
        self._turn += 1
        tried: set[Replica] = set()
        problem = TokenloomError(ErrorCode.TOKENIZER_UNAVAILABLE, "no tokenizer is configured", retry_after_ms=1000)
        while (replica := self._pick(tried)) is not None:
            tried.add(replica)
            replica.outstanding += 1
            try:
                result = await call(replica)
            except (grpc.RpcError, TokenloomError) as error:
                problem = error if isinstance(error, TokenloomError) else error_of(error, unavailable=ErrorCode.TOKENIZER_UNAVAILABLE)
                if not problem.code.spec.retryable:
                    raise problem from None
                self._failed(replica, problem)
            else:
                replica.failures = 0
                return result
            finally:
                replica.outstanding -= 1
        # What gRPC says of a broken connection names our own sockets: it is in the log, and no client's business.
        gone = problem.code is ErrorCode.TOKENIZER_UNAVAILABLE
        message = "no tokenizer can be reached now" if gone else problem.message
        raise TokenloomError(problem.code, message, retry_after_ms=problem.retry_after_ms or 1000)

    def _pick(self, tried: set[Replica]) -> Replica | None:
        """The least busy replica not yet tried; those with an open circuit come last, the one that closes soonest first."""
        now = self._clock.monotonic_ns()
        count = len(self._replicas)
        # The turn rotates ties: equal replicas take calls in a circle.
        order = [self._replicas[(self._turn + offset) % count] for offset in range(count)]
        fresh = [replica for replica in order if replica not in tried]
        return min(fresh, key=lambda replica: (max(replica.closed_again_ns - now, 0), replica.outstanding), default=None)

    def _failed(self, replica: Replica, problem: TokenloomError) -> None:
        if problem.code is ErrorCode.TOKENIZER_BUSY:
            return
        pause = CIRCUIT_OPEN[min(replica.failures, len(CIRCUIT_OPEN) - 1)]
        if not replica.failures:
            replica.failing_since_ns = self._clock.monotonic_ns()
        replica.failures += 1
        replica.closed_again_ns = self._clock.monotonic_ns() + round(pause * 1e9)
        self._metrics.tokenizer_failures.labels(address=replica.address).inc()
        if replica.failures == 1:
            # Before one has ever answered they are still starting, and /ready says so.
            log = _log.warning if self.table is not None else _log.info
            log("a tokenizer replica fails", address=replica.address, error=problem.message)


def _added_tokens(table: TextTable, *kinds: TokenClass) -> dict[str, int]:
    ids = (token_id for token_id, kind in enumerate(table.classes) if kind in kinds)
    return {table.token_bytes(token_id).decode(errors="replace"): token_id for token_id in ids}
