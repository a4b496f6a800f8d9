"""What a scheduler asks to be prepared: compiled beside the runner, once for all that compile to the same, and answered when done."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libs.clock import SystemClock
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.helper_pool import HelperPool, PoolObserver, Refusals
from libs.process import guard
from libs.telemetry.logs import get_logger
from services.worker.constraints.base import Grammar
from services.worker.constraints.prepared import Constraints, PreparedConstraint
from tokenloom.worker.v1 import worker_pb2

_log = get_logger(__name__)

# Grammars kept for the next request with the same constraint, and the memory they may take together. What is prepared stays beyond both.
MAX_CACHED = 512
MAX_CACHED_BYTES = 256 * 1024 * 1024
# Refusals kept, so that a client that sends the same again costs nothing.
MAX_CACHED_REFUSALS = 256
# Constraints that one scheduler may have prepared and not forgotten.
MAX_PREPARED = 16_384

Send = Callable[[worker_pb2.RunResponse], None]


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """What the compiler may take: processes, constraints that wait for them, seconds and bytes of memory for each."""

    processes: int
    max_waiting: int
    time_limit: float
    memory_bytes: int


def compiler(model: Path, backend: str, limits: CompilerLimits, observer: PoolObserver) -> HelperPool:
    """The compiler's processes, not started yet."""
    command = [
        *(sys.executable, "-m", "services.worker.constraints.compiler_process"),
        *(str(model), backend, str(limits.memory_bytes)),
    ]
    refusals = Refusals(
        what="compiling a constraint",
        busy=ErrorCode.CONSTRAINT_BUSY,
        slow=ErrorCode.INVALID_CONSTRAINT,
        deadly=ErrorCode.INVALID_CONSTRAINT,
    )
    return HelperPool(
        command,
        size=limits.processes,
        max_waiting=limits.max_waiting,
        time_limit=limits.time_limit,
        refusals=refusals,
        clock=SystemClock(),
        observer=observer,
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What became of a constraint, and microseconds in the queue and in the compiler (0 both: it was cached)."""

    grammar: Grammar
    queued_us: int = 0
    compile_us: int = 0


class Preparer:
    """Answers prepares. Lives in the server's loop; grammars are built in threads of their own."""

    def __init__(self, pool: HelperPool, constraints: Constraints, observe: Callable[[str, float], None]) -> None:
        """`observe` is told what became of each constraint (`compiled`, `cached`, `refused`, `busy`) and the seconds of its compiling."""
        self._pool, self._backend, self._table, self._observe = pool, constraints.backend, constraints.table, observe
        self._starting: asyncio.Task[None] | None = None
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()
        self._cached_bytes = 0
        self._refusals: OrderedDict[bytes, TokenloomError] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[_Compiled]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Starts the compiler, which nobody waits for: what is asked meanwhile waits in its queue. The process ends if it cannot start."""
        self._starting = guard(asyncio.create_task(self._pool.start(), name="compiler of constraints"))

    def restart(self, epoch: int) -> None:
        """A scheduler took possession."""
        self._wanted.clear()
        self._table.restart(epoch)

    def prepare(self, message: worker_pb2.Prepare, send: Send) -> None:
        """Begins to prepare a constraint; the answer goes to `send`, from this loop."""
        self._wanted.add((message.epoch, message.id))
        task = asyncio.create_task(self._answer(message, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, message: worker_pb2.Forget) -> None:
        """Takes constraints out of the table; one that is still being prepared is not put there."""
        self._wanted.difference_update((message.epoch, number) for number in message.ids)
        self._table.forget(message.epoch, message.ids)

    async def close(self) -> None:
        """Gives up what is not answered and ends the compiler's processes."""
        tasks = [*self._tasks, *self._compiling.values(), *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    async def _answer(self, message: worker_pb2.Prepare, send: Send) -> None:
        prepared = worker_pb2.Prepared(epoch=message.epoch, id=message.id)
        try:
            compiled = await self._prepare(message)
            prepared.queued_us, prepared.compile_us = compiled.queued_us, compiled.compile_us
            self._observe("compiled" if compiled.compile_us else "cached", compiled.compile_us / 1e6)
        except TokenloomError as error:
            self._observe("refused" if error.code is ErrorCode.INVALID_CONSTRAINT else "busy", 0.0)
            prepared.error.CopyFrom(error.to_proto())
            prepared.error.param = message.constraint.param
        finally:
            self._wanted.discard((message.epoch, message.id))
        send(worker_pb2.RunResponse(prepared=prepared))

    async def _prepare(self, message: worker_pb2.Prepare) -> _Compiled:
        if len(self._table) >= MAX_PREPARED:
            raise TokenloomError(ErrorCode.CONSTRAINT_BUSY, f"{MAX_PREPARED} constraints are prepared already", retry_after_ms=1000)
        try:
            constraint = Constraint.from_proto(message.constraint)
        except ValueError as error:
            raise TokenloomError(ErrorCode.INVALID_CONSTRAINT, f"the constraint cannot be read: {error}") from error
        compiled = await self._compiled(constraint)
        if (message.epoch, message.id) in self._wanted:
            self._table.put(message.epoch, message.id, PreparedConstraint(compiled.grammar, constraint.begin_after))
        return compiled

    async def _compiled(self, constraint: Constraint) -> _Compiled:
        key = constraint.key
        if key in self._cache:
            self._cache.move_to_end(key)
            return _Compiled(self._cache[key])
        if key in self._refusals:
            raise self._refusals[key]
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(key, constraint))
            task.add_done_callback(lambda _: self._compiling.pop(key, None))
        return await asyncio.shield(task)

    async def _compile(self, key: bytes, constraint: Constraint) -> _Compiled:
        try:
            answer = await self._pool.ask(constraint.to_proto().SerializeToString())
            began = time.monotonic_ns()
            grammar = await asyncio.to_thread(self._backend.load, answer.payload)
        except TokenloomError as error:
            if error.code is ErrorCode.INVALID_CONSTRAINT:
                self._refusals[key] = error
                while len(self._refusals) > MAX_CACHED_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
        self._keep(key, grammar)
        return _Compiled(grammar, answer.queued_us, max(1, answer.worked_us + (time.monotonic_ns() - began) // 1000))

    def _keep(self, key: bytes, grammar: Grammar) -> None:
        self._cache[key] = grammar
        self._cached_bytes += grammar.size
        pinned = self._table.grammars()
        for other in list(self._cache):
            if len(self._cache) <= MAX_CACHED and self._cached_bytes <= MAX_CACHED_BYTES:
                return
            if other != key and id(self._cache[other]) not in pinned:
                self._cached_bytes -= self._cache.pop(other).size
