"""A gateway's side of the session as a test drives it: submits, cancels, and everything the scheduler answers, by request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from libs.blocks import block_hashes
from libs.packing import pack_ids, unpack_ids
from libs.rpc import PROTOCOL_VERSION, connect
from libs.sampling import SamplingParams
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


@dataclass
class Received:
    """What came back for one request. A delta that leaves a gap or repeats fails the test."""

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    ending: scheduler_pb2.Ending | None = None


class SessionClient:
    """One session over real gRPC. Read with `ended`, `accepted`, `until`."""

    def __init__(self, address: str, gateway: int = 77) -> None:
        self.gateway = gateway
        self.received: dict[int, Received] = {}
        self.frames: list[scheduler_pb2.SchedulerFrame] = []
        self.changed = asyncio.Condition()
        self.error: grpc.aio.AioRpcError | None = None
        self.broken: AssertionError | None = None
        self.over = False
        self._channel = connect(address)
        self._call: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Session()
        self._task: asyncio.Task[None] | None = None

    async def open(self, *, version: int = PROTOCOL_VERSION, shard: int = 0) -> SessionClient:
        """Sends the hello and begins to read."""
        hello = scheduler_pb2.SessionHello(protocol_version=version, gateway_instance=self.gateway, shard=shard, name="test")
        await self._call.write(scheduler_pb2.GatewayFrame(hello=hello))
        self._task = asyncio.create_task(self._read())
        return self

    async def close(self) -> None:
        """Breaks the session."""
        self._call.cancel()
        await self._channel.close()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def submit(self, number: int, prompt: list[int], sampling: SamplingParams, **fields: Any) -> None:
        """Hands over a request."""
        submit = scheduler_pb2.Submit(
            id=number,
            prompt_ids=pack_ids(prompt),
            sampling=sampling.to_proto(),
            block_hashes=b"".join(block_hashes(prompt)),
            **fields,
        )
        has = b"" if len(submit.output_ids) % 4 else submit.output_ids
        self.received.setdefault(number, Received(tokens=unpack_ids(has)))
        await self._call.write(scheduler_pb2.GatewayFrame(submits=[submit]))

    async def cancel(self, number: int, reason: common_pb2.CancelReason.ValueType = common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED) -> None:
        """Asks for a request's end."""
        await self._call.write(scheduler_pb2.GatewayFrame(cancels=[scheduler_pb2.Cancel(id=number, reason=reason)]))

    @property
    def window(self) -> scheduler_pb2.Window:
        """The newest window; an empty one before the first frame."""
        return self.frames[-1].window if self.frames else scheduler_pb2.Window()

    @property
    def model(self) -> scheduler_pb2.ModelFacts | None:
        """What the newest welcome said of the model."""
        facts = [frame.welcome.model for frame in self.frames if frame.HasField("welcome") and frame.welcome.HasField("model")]
        return facts[-1] if facts else None

    async def ready(self) -> SessionClient:
        """Waits until submits are welcome."""
        await self.until(lambda: self.window.ready)
        return self

    async def until(self, condition: Any) -> None:
        """Waits, event by event, until `condition()` holds. The test's own timeout bounds it."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.broken or condition())
        if self.broken is not None:
            raise self.broken

    async def ended(self, number: int) -> Received:
        """The request once its ending is there."""
        await self.until(lambda: self.received[number].ending is not None)
        return self.received[number]

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._call.read(), scheduler_pb2.SchedulerFrame):
                self._take(frame)
                await self._notify()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except AssertionError as broken:
            self.broken = broken
        except asyncio.CancelledError:
            pass
        self.over = True
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _take(self, frame: scheduler_pb2.SchedulerFrame) -> None:
        self.frames.append(frame)
        for number in frame.accepted:
            self.received[number].accepted += 1
        tokens, at = unpack_ids(frame.token_ids), 0
        for number, first, count in zip(frame.ids, frame.first_indexes, frame.counts, strict=True):
            got = self.received[number].tokens
            assert first == len(got), f"request {number}: delta starts at {first}, {len(got)} were delivered"
            got.extend(tokens[at : at + count])
            at += count
        for ending in frame.endings:
            assert self.received[ending.id].ending is None or ending.attempt, "a request ended twice"
            self.received[ending.id].ending = ending
