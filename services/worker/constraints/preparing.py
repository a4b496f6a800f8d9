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
from libs.helper_pool import HelperPool, NoAnswer, PoolObserver, Refusals
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
# What is likely to take its time and lets others pass: from so many bytes on (ordinary schemas have one or two thousand), or after so many
# seconds (ordinary ones take 8 ms with llguidance, 120 with xgrammar).
LONG_BYTES, LONG_SECONDS = 16 * 1024, 0.3
# The compiler stands behind the runner, which a step's latency hangs on, when both want the core.
_NICE = 10
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
        long_after=LONG_SECONDS,
        nice=_NICE,
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What became of a constraint, and microseconds in the queue and in the compiler (0 both: it was cached)."""

    grammar: Grammar
    queued_us: int = 0
    compile_us: int = 0


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why there is no grammar. Not an exception, which would gather a traceback with every request that it is raised for."""

    code: ErrorCode
    message: str
    retry_after_ms: int | None = None


class Preparer:
    """Answers prepares. Lives in the server's loop; grammars are built in threads of their own."""

    def __init__(self, pool: HelperPool, constraints: Constraints, observe: Callable[[str, float], None]) -> None:
        """`observe` is told what became of each constraint (`compiled`, `cached`, `refused`, `busy`) and the seconds of its compiling."""
        self._pool, self._backend, self._table, self._observe = pool, constraints.backend, constraints.table, observe
        self._starting: asyncio.Task[None] | None = None
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()
        self._cached_bytes = 0
        self._refusals: OrderedDict[bytes, _Refused] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[_Compiled | _Refused]] = {}
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
            outcome = await self._prepare(message)
        except Exception:
            _log.exception("a constraint could not be prepared", id=message.id)
            outcome = _Refused(ErrorCode.INTERNAL, "the constraint could not be prepared; the worker's log has the details")
        finally:
            self._wanted.discard((message.epoch, message.id))
        if isinstance(outcome, _Refused):
            self._observe("busy" if outcome.code is ErrorCode.CONSTRAINT_BUSY else "refused", 0.0)
            refusal = TokenloomError(outcome.code, outcome.message, param=message.constraint.param, retry_after_ms=outcome.retry_after_ms)
            prepared.error.CopyFrom(refusal.to_proto())
        else:
            prepared.queued_us, prepared.compile_us = outcome.queued_us, outcome.compile_us
            self._observe("compiled" if outcome.compile_us else "cached", outcome.compile_us / 1e6)
        send(worker_pb2.RunResponse(prepared=prepared))

    async def _prepare(self, message: worker_pb2.Prepare) -> _Compiled | _Refused:
        if len(self._table) >= MAX_PREPARED:
            return _Refused(ErrorCode.CONSTRAINT_BUSY, f"{MAX_PREPARED} constraints are prepared already", 1000)
        try:
            constraint = Constraint.from_proto(message.constraint)
        except ValueError as error:
            return _Refused(ErrorCode.INVALID_CONSTRAINT, f"the constraint cannot be read: {error}")
        outcome = await self._compiled(constraint)
        if isinstance(outcome, _Compiled) and (message.epoch, message.id) in self._wanted:
            self._table.put(message.epoch, message.id, PreparedConstraint(outcome.grammar, constraint.begin_after))
        return outcome

    async def _compiled(self, constraint: Constraint) -> _Compiled | _Refused:
        key = constraint.key
        if key in self._cache:
            self._cache.move_to_end(key)
            return _Compiled(self._cache[key])
        if key in self._refusals:
            return self._refusals[key]
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(key, constraint))
            task.add_done_callback(lambda _: self._compiling.pop(key, None))
        return await asyncio.shield(task)

    async def _compile(self, key: bytes, constraint: Constraint) -> _Compiled | _Refused:
        try:
            question = constraint.to_proto().SerializeToString()
            answer = await self._pool.ask(question, long=len(question) > LONG_BYTES)
            began = time.monotonic_ns()
            grammar = await asyncio.to_thread(self._backend.load, answer.payload)
        except TokenloomError as error:
            refused = _Refused(error.code, error.message, error.retry_after_ms)
            # What took too long, or died, may do neither at another moment: only the compiler's own word is kept.
            if error.code is ErrorCode.INVALID_CONSTRAINT and not isinstance(error, NoAnswer):
                self._refusals[key] = refused
                while len(self._refusals) > MAX_CACHED_REFUSALS:
                    self._refusals.popitem(last=False)
            return refused
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
