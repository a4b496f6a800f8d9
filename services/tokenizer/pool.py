"""Encoder processes behind one bounded queue: what of libs/helper_pool.py is the tokenizer's own.

Processes rather than threads: a chat template is Python, so that threads would take turns on the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.clock import Clock
from libs.errors import ErrorCode
from libs.helper_pool import HelperPool, Refusals
from services.tokenizer.metrics import TokenizerMetrics
from tokenloom.tokenizer.v1 import tokenizer_pb2

_PROMPT = Refusals(
    what="encoding the prompt", busy=ErrorCode.TOKENIZER_BUSY, slow=ErrorCode.INVALID_REQUEST, deadly=ErrorCode.INVALID_REQUEST
)
_CHAT = Refusals(
    what="rendering and encoding the chat", busy=ErrorCode.TOKENIZER_BUSY, slow=ErrorCode.TEMPLATE_ERROR, deadly=ErrorCode.INVALID_REQUEST
)


class EncoderPool:
    """Encodes prompts in `size` processes. Call `start` first and `close` last; errors of prompts are raised by `encode`."""

    def __init__(
        self, command: Sequence[str], *, size: int, max_waiting: int, time_limit: float, clock: Clock, metrics: TokenizerMetrics
    ) -> None:
        """`command` starts one encoder process; `time_limit` is in seconds per prompt."""
        self._metrics = metrics
        self._pool = HelperPool(
            command,
            size=size,
            max_waiting=max_waiting,
            time_limit=time_limit,
            refusals=_PROMPT,
            clock=clock,
            observer=_Observer(metrics),
        )

    async def start(self) -> None:
        """Returns when every process has loaded. Raises TokenloomError(INTERNAL) when one cannot."""
        await self._pool.start()

    async def close(self) -> None:
        """Ends all processes; prompts still inside or waiting are refused as DRAINING."""
        await self._pool.close()

    @property
    def pids(self) -> list[int]:
        """The encoder processes that are loaded."""
        return self._pool.pids

    @property
    def waiting(self) -> int:
        """Prompts in the queue."""
        return self._pool.waiting

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Encodes one prompt, or raises the TokenloomError that refuses it: TOKENIZER_BUSY when the queue is full.

        Cancelling the call takes the prompt out of the queue or, within a quarter of a second, out of its process.
        """
        kind = request.WhichOneof("input") or "none"
        answer = await self._pool.ask(request.SerializeToString(), _CHAT if kind == "chat" else _PROMPT)
        self._metrics.encode.labels(kind=kind).observe(answer.worked_us / 1e6)
        response = tokenizer_pb2.EncodeResponse.FromString(answer.payload)
        response.queue_us = answer.queued_us
        return response


class _Observer:
    """What the pool tells, as metrics."""

    def __init__(self, metrics: TokenizerMetrics) -> None:
        self._metrics = metrics

    def size(self, running: int) -> None:
        """See PoolObserver."""
        self._metrics.pool_size.set(running)

    def busy(self, change: int) -> None:
        """See PoolObserver."""
        self._metrics.busy.inc(change)

    def taken(self, queued_seconds: float) -> None:
        """See PoolObserver."""
        self._metrics.queue.observe(queued_seconds)

    def replaced(self, reason: str) -> None:
        """See PoolObserver."""
        self._metrics.restarts.labels(reason=reason).inc()
