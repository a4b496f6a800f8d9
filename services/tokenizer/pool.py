"""A fixed number of encoder processes behind one bounded queue.

    encode() -> [ waiting, at most `max_waiting` ] -> slot 1: process   one slot = one task that owns one process,
                                                   -> slot 2: process   replaces it when it hangs or dies, and is never
                                                   -> ...               stopped by a prompt

Processes rather than threads: a chat template is Python, so that threads would take turns on the interpreter's lock, and a process
that hangs or grows can be killed (PROTOCOL.md rule 31).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.process import EncoderDied, EncoderProcess
from tokenloom.tokenizer.v1 import tokenizer_pb2

# Seconds that work goes on for after its caller left: most ends sooner, and a new process costs half a second of a core.
ABANDON_GRACE = 0.25
# Seconds before the first, second, ... restart in a row of a process that does not start.
BACK_OFF = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
# Bytes of requests that may wait, beside their number.
MAX_WAITING_BYTES = 256 * 1024 * 1024

_log = get_logger("tokenizer.pool")


@dataclass(slots=True, eq=False)
class _Job:
    """One prompt in the queue or in a process. `result` is cancelled when its caller leaves.

    `log` is what the caller's log lines say of the request: a process that its prompt broke is logged under them too.
    """

    kind: str
    payload: bytes
    queued_ns: int
    result: asyncio.Future[tokenizer_pb2.EncodeResponse]
    log: Mapping[str, Any] = field(default_factory=structlog.contextvars.get_contextvars)
    retried: bool = False

    def refuse(self, code: ErrorCode, message: str) -> None:
        """Ends it with an error, unless its caller has left."""
        if not self.result.done():
            self.result.set_exception(TokenloomError(code, message))


class EncoderPool:
    """Encodes prompts in `size` processes. Call `start` first and `close` last; errors of prompts are raised by `encode`."""

    def __init__(
        self, command: Sequence[str], *, size: int, max_waiting: int, time_limit: float, clock: Clock, metrics: TokenizerMetrics
    ) -> None:
        """`command` starts one encoder process; `time_limit` is in seconds per prompt."""
        self._command, self._size, self._max_waiting, self._time_limit = command, size, max_waiting, time_limit
        self._clock, self._metrics = clock, metrics
        self._waiting: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._arrival = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._processes: set[EncoderProcess] = set()

    async def start(self) -> None:
        """Returns when every process has loaded. Raises TokenloomError(INTERNAL) when one cannot."""
        starting = await asyncio.gather(*(EncoderProcess.start(self._command) for _ in range(self._size)), return_exceptions=True)
        ready = [outcome for outcome in starting if isinstance(outcome, EncoderProcess)]
        failed = [outcome for outcome in starting if isinstance(outcome, BaseException)]
        if failed:
            await asyncio.gather(*(process.kill() for process in ready))
            raise TokenloomError(ErrorCode.INTERNAL, f"an encoder process cannot start: {failed[0]}")
        for process in ready:
            self._joined(process)
            self._slots.append(asyncio.create_task(self._run_slot(process)))

    async def close(self) -> None:
        """Ends all processes; prompts still inside or waiting are refused as DRAINING."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # A slot that was cancelled before its first turn has not ended its process.
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()
        for job in self._waiting:
            job.refuse(ErrorCode.DRAINING, "the tokenizer is shutting down")

    @property
    def pids(self) -> list[int]:
        """The processes that are loaded."""
        return sorted(process.pid for process in self._processes)

    @property
    def waiting(self) -> int:
        """Prompts in the queue."""
        return len(self._waiting)

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Encodes one prompt, or raises the TokenloomError that refuses it: TOKENIZER_BUSY when the queue is full.

        Cancelling the call takes the prompt out of the queue or, within ABANDON_GRACE, out of its process.
        """
        payload = request.SerializeToString()
        if len(self._waiting) >= self._max_waiting or self._waiting_bytes + len(payload) > MAX_WAITING_BYTES:
            message = f"the tokenizer is busy: {len(self._waiting)} prompts wait for {self._size} encoder processes"
            raise TokenloomError(ErrorCode.TOKENIZER_BUSY, message, retry_after_ms=1000)
        result: asyncio.Future[tokenizer_pb2.EncodeResponse] = asyncio.get_running_loop().create_future()
        job = _Job(request.WhichOneof("input") or "none", payload, self._clock.monotonic_ns(), result)
        self._enqueue(job)
        try:
            return await result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)
                self._waiting_bytes -= len(payload)

    def _enqueue(self, job: _Job, *, first: bool = False) -> None:
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        self._waiting_bytes += len(job.payload)
        self._arrival.set()

    async def _next_job(self) -> _Job:
        while not self._waiting:
            self._arrival.clear()
            await self._arrival.wait()
        job = self._waiting.popleft()
        self._waiting_bytes -= len(job.payload)
        return job

    async def _run_slot(self, process: EncoderProcess) -> None:
        """Owns one process at a time, until cancelled."""
        while True:
            try:
                await self._serve(process)
            finally:
                self._processes.discard(process)
                self._metrics.pool_size.set(len(self._processes))
                await process.kill()
            process = await self._restarted()
            self._joined(process)

    def _joined(self, process: EncoderProcess) -> None:
        self._processes.add(process)
        self._metrics.pool_size.set(len(self._processes))

    async def _restarted(self) -> EncoderProcess:
        for attempt in itertools.count():
            await asyncio.sleep(BACK_OFF[min(attempt, len(BACK_OFF) - 1)])
            try:
                return await EncoderProcess.start(self._command)
            except EncoderDied as error:
                _log.error("an encoder process does not start", attempt=attempt + 1, error=str(error))
        raise AssertionError("itertools.count ended")

    async def _serve(self, process: EncoderProcess) -> None:
        """Serves prompts until the process has to be replaced."""
        usable = True
        while usable:
            job = await self._next_job()
            if not process.running:  # it died idle, which says nothing against this prompt
                self._replaced("died", process)
                self._enqueue(job, first=True)
                return
            self._metrics.busy.inc()
            try:
                usable = await self._serve_one(process, job)
            except asyncio.CancelledError:
                job.refuse(ErrorCode.DRAINING, "the tokenizer is shutting down")
                raise
            finally:
                self._metrics.busy.dec()

    async def _serve_one(self, process: EncoderProcess, job: _Job) -> bool:
        """Brings one prompt to its result; False: the process must be replaced."""
        taken_ns = self._clock.monotonic_ns()
        self._metrics.queue.observe((taken_ns - job.queued_ns) / 1e9)
        asking = asyncio.create_task(process.ask(job.payload))
        try:
            await asyncio.wait({asking, job.result}, timeout=self._time_limit, return_when=asyncio.FIRST_COMPLETED)
            if job.result.done() and not asking.done():
                await asyncio.wait({asking}, timeout=ABANDON_GRACE)
            if not asking.done():
                return self._hangs(process, job)
        finally:
            asking.cancel()
        self._metrics.encode.labels(kind=job.kind).observe((self._clock.monotonic_ns() - taken_ns) / 1e9)
        error = asking.exception()
        if isinstance(error, EncoderDied):
            return self._died(process, job)
        if job.result.done():
            return True
        if error is not None:
            job.result.set_exception(error)
        else:
            response = asking.result()
            response.queue_us = (taken_ns - job.queued_ns) // 1000
            job.result.set_result(response)
        return True

    def _hangs(self, process: EncoderProcess, job: _Job) -> bool:
        if job.result.done():
            self._replaced("abandoned", process, job)
        else:
            self._replaced("timeout", process, job)
            code = ErrorCode.TEMPLATE_ERROR if job.kind == "chat" else ErrorCode.INVALID_REQUEST
            what = "rendering and encoding the chat" if job.kind == "chat" else "encoding the prompt"
            job.refuse(code, f"{what} took longer than {self._time_limit:g} s")
        return False

    def _died(self, process: EncoderProcess, job: _Job) -> bool:
        """A prompt is given one more process: the first may have been killed by somebody. Then the prompt itself is to blame."""
        self._replaced("died", process, job)
        if job.retried:
            job.refuse(ErrorCode.INVALID_REQUEST, "two encoder processes died on this prompt; it takes too much memory")
        elif not job.result.done():
            job.retried = True
            self._enqueue(job, first=True)
        return False

    def _replaced(self, reason: str, process: EncoderProcess, job: _Job | None = None) -> None:
        self._metrics.restarts.labels(reason=reason).inc()
        _log.warning("an encoder process is replaced", reason=reason, pid=process.pid, **(job.log if job else {}))
