"""A fixed number of helper processes behind one bounded queue of two lanes.

    ask() -> [ short | long, at most `max_waiting` ] -> slot 1: process   one slot = one task that owns one process,
                                                     -> slot 2: process   replaces it when it hangs or dies, and is never
                                                     -> ...               stopped by a question

Of several processes one is never given a question of the long lane; a question that turns out to be long leaves it, once, for who waits.
Where both lanes wait, every few short questions a long one has its turn.

Processes rather than threads: what works on a client's text may hang or grow, and only a process can be killed (PROTOCOL.md rule 31).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.helper_process import HelperDied, HelperProcess
from libs.telemetry.logs import get_logger

# Seconds that work goes on for after its caller left: most ends sooner, and a new process costs half a second of a core.
ABANDON_GRACE = 0.25
# Short questions that are taken in a row while long ones wait.
SHORT_TURNS = 4
# Seconds before the first, second, ... restart in a row of a process that does not start.
BACK_OFF = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
# Bytes of questions that may wait, beside their number.
MAX_WAITING_BYTES = 256 * 1024 * 1024

_log = get_logger("helpers")


class PoolObserver(Protocol):
    """What is told how a pool fares; called from the pool's loop."""

    def size(self, running: int) -> None:
        """So many processes are loaded."""

    def busy(self, change: int) -> None:
        """One more (+1) or one less (-1) process works."""

    def taken(self, queued_seconds: float) -> None:
        """A question leaves the queue for a process."""

    def replaced(self, reason: str) -> None:
        """A process is replaced: it `died`, hung (`timeout`), worked for nobody (`abandoned`), or others waited for it (`yielded`)."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """How a pool refuses, with a sentence each: too many wait, one took too long, two processes died on one."""

    what: str
    busy: ErrorCode
    slow: ErrorCode
    deadly: ErrorCode


class NoAnswer(TokenloomError):
    """The pool's own refusal: no process has answered. The same question may have an answer at another moment."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and microseconds in the queue and in a process."""

    payload: bytes
    queued_us: int
    worked_us: int


@dataclass(slots=True, eq=False)
class _Job:
    """One question in the queue or in a process. `result` is cancelled when its caller leaves. `long`: its lane.

    `log` is what the caller's log lines say of the request: a process that its question broke is logged under them too.
    """

    payload: bytes
    refusals: Refusals
    queued_ns: int
    result: asyncio.Future[Answer]
    long: bool = False
    log: Mapping[str, Any] = field(default_factory=structlog.contextvars.get_contextvars)
    retried: bool = False

    def refuse(self, code: ErrorCode, message: str) -> None:
        """Ends it with an error, unless its caller has left."""
        if not self.result.done():
            self.result.set_exception(NoAnswer(code, message))


class HelperPool:
    """Asks questions of `size` processes. Call `start` first and `close` last; refusals are raised by `ask`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        size: int,
        max_waiting: int,
        time_limit: float,
        refusals: Refusals,
        clock: Clock,
        observer: PoolObserver,
        long_after: float | None = None,
        nice: int = 0,
    ) -> None:
        """`command` starts one process; `time_limit` is in seconds per question, `long_after` those after which one that was taken for
        short counts as long (None: none does). `nice`: by how much the processes stand behind this one where both want a core.
        """
        self._long_after, self._nice = long_after, nice
        self._command, self._size, self._max_waiting, self._time_limit = command, size, max_waiting, time_limit
        self._refusals, self._clock, self._observer = refusals, clock, observer
        self._short: deque[_Job] = deque()
        self._long: deque[_Job] = deque()
        self._waiting_bytes = 0
        # Long questions in processes, and short ones taken since the last long one.
        self._long_running = self._turns = 0
        self._arrival = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._processes: set[HelperProcess] = set()
        # Those, and the ones whose end has not been seen yet.
        self._owned: set[HelperProcess] = set()

    async def start(self) -> None:
        """Returns when every process has loaded. Raises TokenloomError(INTERNAL) when one cannot."""
        starting = await asyncio.gather(
            *(HelperProcess.start(self._command, nice=self._nice) for _ in range(self._size)), return_exceptions=True
        )
        ready = [outcome for outcome in starting if isinstance(outcome, HelperProcess)]
        failed = [outcome for outcome in starting if isinstance(outcome, BaseException)]
        if failed:
            await asyncio.gather(*(process.kill() for process in ready))
            raise TokenloomError(ErrorCode.INTERNAL, f"a process for {self._refusals.what} cannot start: {failed[0]}")
        for process in ready:
            self._joined(process)
            self._slots.append(asyncio.create_task(self._run_slot(process)))

    async def close(self) -> None:
        """Ends all processes; questions still inside or waiting are refused as DRAINING."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # A slot that was cancelled before its first turn, or while it ended its process, has not seen that end.
        await asyncio.gather(*(process.kill() for process in self._owned))
        self._owned.clear()
        self._processes.clear()
        for job in (*self._short, *self._long):
            job.refuse(ErrorCode.DRAINING, "the process is shutting down")

    @property
    def pids(self) -> list[int]:
        """The processes that are loaded."""
        return sorted(process.pid for process in self._processes)

    @property
    def waiting(self) -> int:
        """Questions in the queue."""
        return len(self._short) + len(self._long)

    async def ask(self, payload: bytes, refusals: Refusals | None = None, *, long: bool = False) -> Answer:
        """Asks, or raises the TokenloomError that refuses it: the process's own, or NoAnswer (Refusals.busy when the queue is full).
        `refusals`: other ones than the pool's; `long`: it is likely to take long, and lets shorter ones pass.

        Cancelling the call takes the question out of the queue or, within ABANDON_GRACE, out of its process.
        """
        if self.waiting >= self._max_waiting or self._waiting_bytes + len(payload) > MAX_WAITING_BYTES:
            message = f"too busy: {self.waiting} wait for {self._size} processes for {self._refusals.what}"
            raise NoAnswer((refusals or self._refusals).busy, message, retry_after_ms=1000)
        result: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = _Job(payload, refusals or self._refusals, self._clock.monotonic_ns(), result, long)
        self._enqueue(job)
        try:
            return await result
        finally:
            if job in (lane := self._lane(job)):
                lane.remove(job)
                self._waiting_bytes -= len(payload)

    def _lane(self, job: _Job) -> deque[_Job]:
        return self._long if job.long else self._short

    def _enqueue(self, job: _Job, *, first: bool = False) -> None:
        if first:
            self._lane(job).appendleft(job)
        else:
            self._lane(job).append(job)
        self._waiting_bytes += len(job.payload)
        self._arrival.set()

    @property
    def _long_places(self) -> int:
        """Processes that may work on long questions at once."""
        return max(1, self._size - 1)

    async def _next_job(self) -> _Job:
        while (job := self._take()) is None:
            self._arrival.clear()
            await self._arrival.wait()
        self._waiting_bytes -= len(job.payload)
        return job

    def _take(self) -> _Job | None:
        """None: nothing waits that may run now."""
        if self._long and self._long_running < self._long_places and (not self._short or self._turns >= SHORT_TURNS):
            self._turns = 0
            return self._long.popleft()
        self._turns = self._turns + 1 if self._long else 0
        return self._short.popleft() if self._short else None

    async def _run_slot(self, process: HelperProcess) -> None:
        """Owns one process at a time, until cancelled."""
        while True:
            try:
                await self._serve(process)
            finally:
                self._processes.discard(process)
                self._observer.size(len(self._processes))
                await process.kill()
                self._owned.discard(process)
            process = await self._restarted()
            self._joined(process)

    def _joined(self, process: HelperProcess) -> None:
        self._processes.add(process)
        self._owned.add(process)
        self._observer.size(len(self._processes))

    async def _restarted(self) -> HelperProcess:
        for attempt in itertools.count():
            await asyncio.sleep(BACK_OFF[min(attempt, len(BACK_OFF) - 1)])
            try:
                return await HelperProcess.start(self._command, nice=self._nice)
            except HelperDied as error:
                _log.error("a process does not start", what=self._refusals.what, attempt=attempt + 1, error=str(error))
        raise AssertionError("itertools.count ended")

    async def _serve(self, process: HelperProcess) -> None:
        """Serves questions until the process has to be replaced."""
        usable = True
        while usable:
            job = await self._next_job()
            if not process.running:  # it died idle, which says nothing against this question
                self._replaced("died", process)
                self._enqueue(job, first=True)
                return
            self._observer.busy(1)
            self._long_running += job.long
            try:
                usable = await self._serve_one(process, job)
            except asyncio.CancelledError:
                job.refuse(ErrorCode.DRAINING, "the process is shutting down")
                raise
            finally:
                self._observer.busy(-1)
                if job.long:
                    self._long_running -= 1
                    self._arrival.set()

    async def _serve_one(self, process: HelperProcess, job: _Job) -> bool:
        """Brings one question to its result; False: the process must be replaced."""
        taken_ns = self._clock.monotonic_ns()
        self._observer.taken((taken_ns - job.queued_ns) / 1e9)
        asking = asyncio.create_task(process.ask(job.payload))
        try:
            if not await self._in_time(asking, job):
                return self._yields(process, job)
            if job.result.done() and not asking.done():
                await asyncio.wait({asking}, timeout=ABANDON_GRACE)
            if not asking.done():
                return self._hangs(process, job)
        finally:
            asking.cancel()
        error = asking.exception()
        if isinstance(error, HelperDied):
            return self._died(process, job)
        if job.result.done():
            return True
        if error is not None:
            job.result.set_exception(error)
        else:
            worked_us = (self._clock.monotonic_ns() - taken_ns) // 1000
            job.result.set_result(Answer(asking.result(), (taken_ns - job.queued_ns) // 1000, worked_us))
        return True

    async def _in_time(self, asking: asyncio.Task[bytes], job: _Job) -> bool:
        """Waits for an answer, for the caller to leave, or for the limit; False: it is long, and others wait for its place.

        A question that was short becomes a long one here. It is sent away at most once: those of the long lane keep their places.
        """
        either: set[asyncio.Future[Any]] = {asking, job.result}
        began, turn = self._clock.monotonic_ns(), self._time_limit if job.long or self._long_after is None else self._long_after
        while True:
            left = self._time_limit - (self._clock.monotonic_ns() - began) / 1e9
            done, _ = await asyncio.wait(either, timeout=min(turn, left), return_when=asyncio.FIRST_COMPLETED)
            if done or left <= turn:
                return True
            if not job.long:
                job.long = True
                self._long_running += 1
            if self._short and self._long_running > self._long_places:
                return False

    def _yields(self, process: HelperProcess, job: _Job) -> bool:
        self._replaced("yielded", process, job)
        self._enqueue(job)
        return False

    def _hangs(self, process: HelperProcess, job: _Job) -> bool:
        if job.result.done():
            self._replaced("abandoned", process, job)
        else:
            self._replaced("timeout", process, job)
            job.refuse(job.refusals.slow, f"{job.refusals.what} took longer than {self._time_limit:g} s")
        return False

    def _died(self, process: HelperProcess, job: _Job) -> bool:
        """A question is given one more process: the first may have been killed by somebody. Then the question itself is to blame."""
        self._replaced("died", process, job)
        if job.retried:
            job.refuse(job.refusals.deadly, f"two processes for {job.refusals.what} died on this one; it may take too much memory")
        elif not job.result.done():
            job.retried = True
            self._enqueue(job, first=True)
        return False

    def _replaced(self, reason: str, process: HelperProcess, job: _Job | None = None) -> None:
        self._observer.replaced(reason)
        _log.warning("a process is replaced", what=self._refusals.what, reason=reason, pid=process.pid, **(job.log if job else {}))
