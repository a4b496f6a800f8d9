"""A WorkerService over real gRPC whose computing is the block-modelling ModelWorker: for tests of the scheduler's shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.rpc import PROTOCOL_VERSION, Server, abort, listen, new_server
from tests.support.core_leases import LeaseRunner
from tests.support.model_worker import EOS, VOCABULARY, ModelWorker
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2, worker_pb2_grpc


def worker_facts(
    blocks: int, slots: int, max_model_len: int, *, fingerprint: str = "table", numerics: str = "hash"
) -> worker_pb2.WorkerFacts:
    """What a worker that serves ModelWorker's model says of itself; `fingerprint` is the tokenizer's."""
    return worker_pb2.WorkerFacts(
        fingerprints=common_pb2.Fingerprints(model="model", tokenizer=fingerprint, numerics=numerics),
        block_size=16,
        num_blocks=blocks,
        kv_dtype="float32",
        max_model_len=max_model_len,
        eos_token_ids=[EOS],
        vocab_size=VOCABULARY,
        logits_width=VOCABULARY,
        max_logprobs=20,
        max_in_flight=2,
        feed_forward_distance=1,
        num_slots=slots,
        max_tokens_per_step=64,
        device="model",
        constraint_backend="model",
    )


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One group. `gate` set: steps run; cleared: they wait.

    `fail_steps`: how many of the next batches fail. `refuse_steps`: how many are answered not_run. `answer`: replaces a result before it
    is sent. `compiling` set: constraints are answered, with `verdict`'s error if it has one; cleared: they wait. `batches`, `cuts`,
    `prepares` and `forgotten`: what arrived; `overlaps`: how many batches did while a step was running. `deaf`: cuts are ignored.
    `violations`: reads of blocks that did not hold what they should, and batches that break the rules.
    """

    def __init__(self, *, blocks: int = 64, slots: int = 8, max_model_len: int = 128, step_seconds: float = 0.0) -> None:
        self.blocks, self.slots, self.max_model_len, self.step_seconds = blocks, slots, max_model_len, step_seconds
        self.model = ModelWorker(blocks, slots)
        self.runner = LeaseRunner(self.model)
        self.deaf = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_steps = 0
        self.refuse_steps = 0
        self.answer: Callable[[worker_pb2.StepResult], worker_pb2.StepResult] = lambda result: result
        self.overlaps = 0
        self.violations: list[AssertionError] = []
        self.stepping = False
        self.highest_token = 0
        self.attaches: list[worker_pb2.Attach] = []
        self.batches: list[worker_pb2.StepBatch] = []
        self.cuts: list[worker_pb2.Cut] = []
        self.prepares: list[worker_pb2.Prepare] = []
        self.forgotten: list[int] = []
        self.compiling = asyncio.Event()
        self.compiling.set()
        self.verdict: Callable[[Constraint], TokenloomError | None] = lambda constraint: None
        self.backend = "model"
        self.arrived = asyncio.Condition()
        self.fingerprint, self.numerics = "table", "hash"
        self.running_us = 0
        self.beat_seconds = 0.05
        self._compilers: list[asyncio.Task[None]] = []
        self._server: Server | None = None
        self._leave: asyncio.Future[TokenloomError | None] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        self._writing = asyncio.Lock()

    async def start(self, address: str) -> str:
        """Listens; returns the address."""
        self._server = new_server([])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.server)
        return await listen(self._server, address)

    async def stop(self) -> None:
        """Dies: every stream breaks at once. A worker that comes back is a new object."""
        if self._server is not None:
            await self._server.server.stop(0)
            self._server = None

    async def drain(self) -> None:
        """Leaves in peace: the stream ends with DRAINING, and the worker is gone."""
        await self.end_stream(TokenloomError(ErrorCode.DRAINING, "the worker is shutting down"))
        await self.stop()

    async def end_stream(self, error: TokenloomError | None = None) -> None:
        """Ends the stream that is open, with `error` or as if all were said."""
        self._leave.set_result(error)
        await self._left.wait()

    async def wait_batches(self, count: int) -> None:
        """Until `count` batches have arrived since the start."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.batches) >= count)

    async def wait_attaches(self, count: int) -> None:
        """Until `count` attaches have been asked for since the start, refused ones included."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.attaches) >= count)

    async def Run(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """See WorkerService.Run."""
        first = await context.read()
        attach = first.attach
        self.attaches.append(attach)
        await self._notify()
        if attach.fencing_token < self.highest_token:
            error = TokenloomError(ErrorCode.STALE_FENCING_TOKEN, f"a scheduler with token {self.highest_token} was here")
            await abort(context, error, worker_pb2.FencingRefusal(highest_fencing_token=self.highest_token))
        self.highest_token = attach.fencing_token
        self.running_us = 0
        self.model = ModelWorker(self.blocks, self.slots, epoch=attach.epoch)
        self.runner = LeaseRunner(self.model)
        await context.write(worker_pb2.RunResponse(attached=self._attached(attach.epoch)))
        self._leave, self._left = asyncio.get_running_loop().create_future(), asyncio.Event()
        tasks = [asyncio.create_task(work) for work in (self._read(context), self._beat(attach.epoch, context), self._steps(context))]
        try:
            await asyncio.wait([*tasks, self._leave], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks, self._compilers = [*tasks, *self._compilers], []
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            self.violations.extend(end for end in ends if isinstance(end, AssertionError))
            self._left.set()
        if self._leave.done() and (error := self._leave.result()) is not None:
            await abort(context, error)

    async def wait_cuts(self, count: int) -> None:
        """Until `count` cuts have arrived since the start."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.cuts) >= count)

    async def wait_prepares(self, count: int) -> None:
        """Until `count` constraints have been asked for since the start."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.prepares) >= count)

    async def _compile(self, ask: worker_pb2.Prepare, context: Any) -> None:
        await self.compiling.wait()
        answer = self.model.compile(ask, self.verdict(Constraint.from_proto(ask.constraint)))
        await self._write(context, worker_pb2.RunResponse(prepared=answer))

    async def _read(self, context: Any) -> None:
        while isinstance(request := await context.read(), worker_pb2.RunRequest):
            if request.HasField("prepare"):
                self.prepares.append(request.prepare)
                self._compilers.append(asyncio.create_task(self._compile(request.prepare, context)))
            elif request.HasField("forget"):
                self.forgotten.extend(request.forget.ids)
                self.model.forget(request.forget.ids)
            elif request.HasField("cut"):
                self.cuts.append(request.cut)
                for message in [] if self.deaf else self.runner.cut(request.cut):
                    await self._write(context, message)
            else:
                self.batches.append(request.batch)
                self.overlaps += self.stepping
                self.runner.submit(request.batch)
            await self._notify()

    async def _notify(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    async def _steps(self, context: Any) -> None:
        while True:
            async with self.arrived:
                await self.arrived.wait_for(lambda: not self.runner.idle)
            self.stepping = True
            for message in self.runner.begin():
                await self._write(context, message)
            await self.gate.wait()
            if self.step_seconds:
                await asyncio.sleep(self.step_seconds)  # stands for the time that a step takes
            self.stepping = False
            for message in self._end_step():
                await self._write(context, message)

    async def _write(self, context: Any, message: worker_pb2.RunResponse) -> None:
        async with self._writing:  # gRPC takes one message at a time
            await context.write(message)

    def _end_step(self) -> list[worker_pb2.RunResponse]:
        refuse, self.refuse_steps = self.refuse_steps > 0, max(0, self.refuse_steps - 1)
        fail = not refuse and self.fail_steps > 0
        self.fail_steps -= fail
        said = self.runner.end(fail=fail, refuse=refuse)
        for message in said:
            if message.HasField("result"):
                if self.step_seconds:
                    message.result.timings.total_us = int(self.step_seconds * 1e6)
                message.result.CopyFrom(self.answer(message.result))
        return said

    async def _beat(self, epoch: int, context: Any) -> None:
        while True:
            beat = worker_pb2.Heartbeat(epoch=epoch, running_us=self.running_us, running_step=1)
            await self._write(context, worker_pb2.RunResponse(heartbeat=beat))
            await asyncio.sleep(self.beat_seconds)

    def _attached(self, epoch: int) -> worker_pb2.Attached:
        facts = worker_facts(self.blocks, self.slots, self.max_model_len, fingerprint=self.fingerprint, numerics=self.numerics)
        facts.constraint_backend = self.backend
        return worker_pb2.Attached(
            protocol_version=PROTOCOL_VERSION, boot_id=7, highest_fencing_token=self.highest_token, epoch=epoch, facts=facts
        )
