"""Streams to worker groups: found in the registry or given by address, dialled, attached, watched. Moves messages, decides nothing.

One `WorkerLink` per address lives as long as the address is known; it dials, attaches with the leader's fencing token and a new epoch,
and hands what it hears to the engine. Whatever ends the stream (the worker's death, a hung step, silence) ends in one `worker_lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from libs.errors import ErrorCode, TokenloomError
from libs.rpc import PROTOCOL_VERSION, connect, detail_of, error_of
from libs.telemetry.logs import get_logger
from tokenloom.worker.v1 import worker_pb2, worker_pb2_grpc

# The worker sends one heartbeat a second; so many seconds of silence on an attached stream mean that it is gone.
HEARTBEAT_TIMEOUT = 10.0
# Seconds that a worker may take to finish its running batch and answer an attach.
ATTACH_TIMEOUT = 60.0
_THAW_SECONDS = 0.5
_BACKOFF_FIRST, _BACKOFF_MOST = 0.1, 2.0
# Ends of a stream that say nothing against the batch that was running.
_PEACEFUL = frozenset({ErrorCode.DRAINING, ErrorCode.STALE_FENCING_TOKEN, ErrorCode.SESSION_LOST})

log = get_logger(__name__)


class LinkOwner(Protocol):
    """What a link needs of the engine."""

    async def next_epoch(self) -> tuple[int, int]:
        """The leader's fencing token and an epoch that was never used."""

    async def token_refused(self, highest: int, *, was_attached: bool) -> None:
        """A worker has seen the token `highest`, above ours; `was_attached`: and obeyed us before, so that another leader has come."""

    def worker_attached(self, link: WorkerLink, attached: worker_pb2.Attached) -> None:
        """The worker is clean and may be given batches. Raises TokenloomError when it does not fit the mesh."""

    def worker_lost(self, link: WorkerLink, *, crashed: bool) -> None:
        """The stream of an attached worker is gone; `crashed`: not because the worker drains."""

    def step_patience_us(self, link: WorkerLink) -> float:
        """How long the worker's running step may run before it counts as hung."""

    def worker_answered(self, link: WorkerLink, result: worker_pb2.StepResult) -> None:
        """A batch's outcome has arrived. Raises LostWorker when the answer shows that the worker must be attached anew."""

    def worker_closed(self, link: WorkerLink, closed: worker_pb2.Closed) -> None:
        """A worker says where the lease that it was asked to end early does end."""

    def worker_prepared(self, link: WorkerLink, answer: worker_pb2.Prepared) -> None:
        """A worker says what became of a constraint that it was asked to compile."""


class LostWorker(Exception):
    """The stream must end: the reason is the message."""


@dataclass(eq=False)
class WorkerLink:
    """The stream to one worker group. `outgoing` holds at most the batches that the group may have in flight, a cut, and what live requests
    want compiled."""

    address: str
    owner: LinkOwner
    outgoing: asyncio.Queue[worker_pb2.RunRequest] = field(default_factory=asyncio.Queue)
    attached: bool = False
    task: asyncio.Task[None] | None = None
    heartbeat: worker_pb2.Heartbeat = field(default_factory=worker_pb2.Heartbeat)

    @property
    def name(self) -> str:
        """The group's name: its address."""
        return self.address

    def start(self) -> None:
        """Begins to dial, and goes on until `stop`."""
        self.task = asyncio.create_task(self._run(), name=f"worker-link {self.address}")

    async def stop(self) -> None:
        """Ends the stream for good."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def send(self, batch: worker_pb2.StepBatch) -> None:
        """Queues a batch for the stream."""
        self.outgoing.put_nowait(worker_pb2.RunRequest(batch=batch))

    def send_cut(self, cut: worker_pb2.Cut) -> None:
        """Queues a cut for the stream."""
        self.outgoing.put_nowait(worker_pb2.RunRequest(cut=cut))

    def send_prepare(self, prepare: worker_pb2.Prepare) -> None:
        """Queues a constraint to be compiled."""
        self.outgoing.put_nowait(worker_pb2.RunRequest(prepare=prepare))

    def send_forget(self, forget: worker_pb2.Forget) -> None:
        """Queues word of constraints that may go."""
        self.outgoing.put_nowait(worker_pb2.RunRequest(forget=forget))

    async def _run(self) -> None:
        backoff, said = _BACKOFF_FIRST, ""
        async with connect(self.address) as channel:
            while True:
                error = await self._stream_error(channel)
                was_attached, self.attached = self.attached, False
                if was_attached:
                    self.owner.worker_lost(self, crashed=error.code not in _PEACEFUL)
                    backoff, said = _BACKOFF_FIRST, ""
                if error.message != said:
                    event = "worker stream ended" if was_attached else "worker cannot be attached"
                    log.warning(event, worker=self.address, reason=error.message)
                    said = error.message
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _BACKOFF_MOST)

    async def _stream_error(self, channel: grpc.aio.Channel) -> TokenloomError:
        """Runs one stream to its end, and says why it ended."""
        try:
            await self._stream(worker_pb2_grpc.WorkerServiceStub(channel))
        except LostWorker as lost:
            return TokenloomError(ErrorCode.UNAVAILABLE, str(lost))
        except TokenloomError as error:
            return error
        except grpc.RpcError as rpc_error:
            reason = error_of(rpc_error)
            if reason.code is ErrorCode.STALE_FENCING_TOKEN:
                refusal = detail_of(rpc_error, worker_pb2.FencingRefusal)
                await self.owner.token_refused(refusal.highest_fencing_token if refusal else 0, was_attached=self.attached)
            return reason
        except Exception as error:  # a bug here or nonsense from there must not leave the group attached to a dead link
            log.exception("worker stream broke", worker=self.address)
            return TokenloomError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        raise AssertionError("a stream ends by an exception")

    async def _stream(self, stub: Any) -> None:
        token, epoch = await self.owner.next_epoch()
        call = stub.Run()
        attach = worker_pb2.Attach(protocol_version=PROTOCOL_VERSION, fencing_token=token, epoch=epoch, scheduler="scheduler")
        writer = None
        try:
            await call.write(worker_pb2.RunRequest(attach=attach))
            answer = await self._read(call, ATTACH_TIMEOUT)
            if not answer.HasField("attached") or answer.attached.epoch != epoch:
                raise LostWorker("the worker's first answer is not the attach's")
            if abs(answer.attached.protocol_version - PROTOCOL_VERSION) > 1:
                version = answer.attached.protocol_version
                raise TokenloomError(ErrorCode.PROTOCOL_VERSION, f"the worker speaks version {version}, this scheduler {PROTOCOL_VERSION}")
            self.outgoing = asyncio.Queue()
            self.owner.worker_attached(self, answer.attached)
            self.attached = True
            writer = asyncio.create_task(self._write(call, self.outgoing))
            while True:
                self._dispatch(await self._read(call, HEARTBEAT_TIMEOUT), epoch)
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any, timeout: float) -> worker_pb2.RunResponse:
        reading = asyncio.ensure_future(call.read())
        try:
            # A second, short wait: if this process itself stood still, what the worker said meanwhile lies unread behind the timer.
            for patience in (timeout, _THAW_SECONDS):
                if not reading.done():
                    await asyncio.wait([reading], timeout=patience)
            if not reading.done():
                raise LostWorker(f"the worker was silent for {timeout:.0f} s")
        finally:
            reading.cancel()
        message = reading.result()
        if isinstance(message, worker_pb2.RunResponse):
            return message
        code = await call.code()
        if code is grpc.StatusCode.OK:
            raise LostWorker("the worker ended the stream")
        raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), await call.details())

    def _dispatch(self, message: worker_pb2.RunResponse, epoch: int) -> None:
        match message.WhichOneof("kind"):
            case "result":
                self.owner.worker_answered(self, message.result)
            case "closed":
                self.owner.worker_closed(self, message.closed)
            case "prepared":
                self.owner.worker_prepared(self, message.prepared)
            case "heartbeat" if message.heartbeat.epoch == epoch:
                self.heartbeat = message.heartbeat
                if message.heartbeat.running_us > self.owner.step_patience_us(self):
                    step = message.heartbeat.running_step
                    raise LostWorker(f"step {step} has been running for {message.heartbeat.running_us / 1e6:.0f} s: the worker hangs")
            case _:
                pass

    @staticmethod
    async def _write(call: Any, outgoing: asyncio.Queue[worker_pb2.RunRequest]) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())
