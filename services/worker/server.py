"""The worker's gRPC service: one scheduler at a time, fenced by its token, each attach an epoch of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from libs import rpc
from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.worker.constraints.preparing import Preparer
from services.worker.runner import Runner
from tokenloom.worker.v1 import worker_pb2, worker_pb2_grpc

_log = get_logger(__name__)
HEARTBEAT_SECONDS = 1.0
# A connection that is closed while the other side still writes breaks there before it has read its stream's end.
_LINGER_SECONDS = 0.2
# One release of skew is served (PROTOCOL.md rule 24); version 0 is never sent.
_OLDEST_VERSION = max(1, rpc.PROTOCOL_VERSION - 1)

Context = grpc.aio.ServicerContext[worker_pb2.RunRequest, worker_pb2.RunResponse]


class _Stream:
    """The attached stream: its epoch, and what waits to be written.

    The outbox is bounded by what a scheduler may have unanswered: two batches, their leases' steps, its prepares, and one heartbeat.
    """

    def __init__(self, attach: worker_pb2.Attach) -> None:
        self.attach = attach
        self.outbox: asyncio.Queue[worker_pb2.RunResponse | TokenloomError] = asyncio.Queue()
        self.ended = False
        self._loop = asyncio.get_running_loop()

    def send(self, response: worker_pb2.RunResponse) -> None:
        """Queues a response from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the process ends, and so did the stream
            self._loop.call_soon_threadsafe(self.outbox.put_nowait, response)

    def end(self, error: TokenloomError) -> None:
        """Ends the stream after what is queued."""
        self.ended = True
        self.outbox.put_nowait(error)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Takes attaches and passes batches to the runner. Lives in one event loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._boot_id = secrets.randbits(64) or 1
        self._facts: worker_pb2.WorkerFacts | None = None
        self._preparer: Preparer | None = None
        self._highest_token = 0
        self._stream: _Stream | None = None
        self._draining = False

    def loaded(self, facts: worker_pb2.WorkerFacts, preparer: Preparer | None = None) -> None:
        """The model is there: attaches are taken from now on. `preparer`: what prepares constraints; None: none are."""
        self._facts, self._preparer = facts, preparer

    async def drain(self) -> None:
        """Refuses new streams, lets the running step end and its answer out, ends the stream, and gives its peer a moment to read why."""
        self._draining = True
        await asyncio.to_thread(self._runner.stop)
        if self._preparer is not None:
            await self._preparer.close()
        if self._stream is not None:
            self._stream.end(TokenloomError(ErrorCode.DRAINING, "the worker is shutting down"))
            await asyncio.sleep(_LINGER_SECONDS)

    async def Run(self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: Context) -> AsyncIterator[worker_pb2.RunResponse]:
        """See worker.v1.WorkerService."""
        try:
            stream, version = self._admit(await anext(request_iterator))
        except StopAsyncIteration:
            return
        except TokenloomError as error:
            _log.warning("attach refused", reason=error.message)
            await rpc.abort(context, error, *self._details(error))
        tasks: list[asyncio.Task[None]] = []
        try:
            yield await self._possess(stream, version)
            tasks += [asyncio.create_task(self._read(request_iterator, stream)), asyncio.create_task(self._beat(stream))]
            while not isinstance(item := await stream.outbox.get(), TokenloomError):
                yield item
            await rpc.abort(context, item, *self._details(item))
        finally:
            for task in tasks:
                task.cancel()
            self._release(stream)

    def _details(self, error: TokenloomError) -> list[worker_pb2.FencingRefusal]:
        """What a scheduler whose token is too low must know to lead again, or not to."""
        stale = error.code is ErrorCode.STALE_FENCING_TOKEN
        return [worker_pb2.FencingRefusal(highest_fencing_token=self._highest_token)] if stale else []

    def _admit(self, request: worker_pb2.RunRequest) -> tuple[_Stream, int]:
        """Checks the first message of a stream; the stream that was attached ends. Returns the new one and the version both will speak."""
        if self._draining:
            raise TokenloomError(ErrorCode.DRAINING, "the worker is shutting down")
        if self._facts is None:
            raise TokenloomError(ErrorCode.UNAVAILABLE, "the worker is loading its model", retry_after_ms=1000)
        if request.WhichOneof("kind") != "attach":
            raise TokenloomError(ErrorCode.PROTOCOL_VIOLATION, "the first message of a stream must be an attach")
        attach = request.attach
        if not _OLDEST_VERSION <= attach.protocol_version <= rpc.PROTOCOL_VERSION + 1:
            text = f"protocol version {attach.protocol_version} is not spoken here; {_OLDEST_VERSION} to {rpc.PROTOCOL_VERSION + 1} are"
            raise TokenloomError(ErrorCode.PROTOCOL_VERSION, text)
        if not attach.fencing_token or attach.fencing_token < self._highest_token:
            text = f"fencing token {attach.fencing_token} is older than {self._highest_token}"
            raise TokenloomError(ErrorCode.STALE_FENCING_TOKEN, text)
        if not attach.epoch or (self._stream is not None and self._stream.attach.epoch == attach.epoch):
            raise TokenloomError(ErrorCode.PROTOCOL_VIOLATION, f"epoch {attach.epoch} is not a new one")
        if self._stream is not None:
            code = ErrorCode.STALE_FENCING_TOKEN if attach.fencing_token > self._highest_token else ErrorCode.SESSION_LOST
            self._stream.end(TokenloomError(code, f"{attach.scheduler or 'another scheduler'} attached with token {attach.fencing_token}"))
        self._highest_token = attach.fencing_token
        self._stream = stream = _Stream(attach)
        return stream, min(attach.protocol_version, rpc.PROTOCOL_VERSION)

    async def _possess(self, stream: _Stream, version: int) -> worker_pb2.RunResponse:
        """Waits until the runner is clean."""
        loop, clean = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            loop.call_soon_threadsafe(clean.set)

        self._runner.attach(stream.attach.epoch, done)
        await clean.wait()
        if self._preparer is not None:
            self._preparer.restart(stream.attach.epoch)
        _log.info("attached", scheduler=stream.attach.scheduler, epoch=stream.attach.epoch, fencing_token=stream.attach.fencing_token)
        return worker_pb2.RunResponse(
            attached=worker_pb2.Attached(
                protocol_version=version,
                boot_id=self._boot_id,
                highest_fencing_token=self._highest_token,
                epoch=stream.attach.epoch,
                facts=self._facts,
            )
        )

    async def _read(self, requests: AsyncIterator[worker_pb2.RunRequest], stream: _Stream) -> None:
        """Passes the stream's messages on until the scheduler closes its side or sends rubbish, which ends the stream."""
        try:
            await self._pass_on(requests, stream)
        except Exception as error:  # else nobody would read the stream any more, and its heartbeats would go on
            if stream.ended:
                return
            _log.exception("a message cannot be taken", scheduler=stream.attach.scheduler)
            stream.end(TokenloomError(ErrorCode.PROTOCOL_VIOLATION, f"a message cannot be taken: {type(error).__name__}: {error}"))

    async def _pass_on(self, requests: AsyncIterator[worker_pb2.RunRequest], stream: _Stream) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "batch":
                    self._runner.submit(request.batch, stream.send)
                case "cut":
                    self._runner.cut(request.cut, stream.send)
                case "prepare":
                    self._prepare(request.prepare, stream)
                case "forget":
                    if self._preparer is not None:
                        self._preparer.forget(request.forget)
                case _:
                    stream.end(TokenloomError(ErrorCode.PROTOCOL_VIOLATION, "a stream attaches once"))
                    return
        stream.end(TokenloomError(ErrorCode.CANCELLED, "the scheduler closed the stream"))

    def _prepare(self, message: worker_pb2.Prepare, stream: _Stream) -> None:
        if self._preparer is not None:
            self._preparer.prepare(message, stream.send)
            return
        error = TokenloomError(ErrorCode.UNSUPPORTED, "this worker takes no constraints", param=message.constraint.param)
        stream.send(worker_pb2.RunResponse(prepared=worker_pb2.Prepared(epoch=message.epoch, id=message.id, error=error.to_proto())))

    async def _beat(self, stream: _Stream) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if stream.outbox.empty():  # a peer that does not read gets no pile of them
                stream.outbox.put_nowait(worker_pb2.RunResponse(heartbeat=self._runner.heartbeat()))

    def _release(self, stream: _Stream) -> None:
        """The stream is gone: its queued batches are dropped, unless a newer attach has done so already."""
        if self._stream is stream:
            self._stream = None
            self._runner.attach(0, _nothing)
        _log.info("detached", scheduler=stream.attach.scheduler, epoch=stream.attach.epoch)


def _nothing() -> None:
    """Nobody waits for this one."""
