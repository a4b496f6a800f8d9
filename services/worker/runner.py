"""The runner: one thread that owns the model, and a short queue of batches in front of it.

The thread loads the model, then takes one piece of work after the other: an attach, or a batch of one or several steps. What a server
must know at once (which step is running, since when) it reads from `heartbeat`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.worker.batch import Batch, granted_steps, parse_batch
from services.worker.chain import Chain
from services.worker.engine import MAX_IN_FLIGHT
from services.worker.step_log import LoggedStep, StepLog
from services.worker.steps import Answered, Steps
from tokenloom.worker.v1 import worker_pb2

_log = get_logger(__name__)

# Sends a response on the attached stream; called from any thread, must not block.
Sink = Callable[[worker_pb2.RunResponse], None]


@dataclass(frozen=True, slots=True)
class _Attach:
    epoch: int
    done: Callable[[], None]


@dataclass(slots=True)
class _Work:
    """A batch in the queue, parsed, or why it cannot be. Steps `number` .. `last` are granted, those up to `started` have started."""

    epoch: int
    number: int
    predecessor: int
    message: worker_pb2.StepBatch
    parsed: Batch | TokenloomError
    sink: Sink
    arrived_ns: int
    last: int
    started: int
    announce: bool = False  # a cut waits for its answer until the last step starts


class Runner:
    """See the module. All methods may be called from any thread."""

    def __init__(
        self,
        prepare: Callable[[], Steps],
        on_loaded: Callable[[Steps | BaseException], None],
        on_broken: Callable[[], None],
        log: StepLog | None = None,
    ) -> None:
        """`prepare` loads the model, in the runner's thread, so that torch keeps one team of threads; `on_loaded` is called there too.

        `on_broken` is called there when the thread ends by an error of its own: nothing will be computed any more. `log`: where steps that
        ran are recorded.
        """
        self._prepare = prepare
        self._on_loaded = on_loaded
        self._on_broken = on_broken
        self._log = log
        self._lock = threading.Condition()
        self._queue: deque[_Attach | _Work] = deque()
        self._epoch = 0
        self._unanswered = 0
        self._stopping = False
        self._current: _Work | None = None
        self._finished: _Work | None = None
        self._running_since_ns = self._last_step = 0
        self._chain = Chain()
        self._thread = threading.Thread(target=self._main, name="runner", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Lets the running step end, drops what is queued, and waits for the thread."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()
        with self._lock:
            waiting = self._drop_queue()
        for attach in waiting:
            attach.done()
        if self._log is not None:
            self._log.close()

    def attach(self, epoch: int, done: Callable[[], None]) -> None:
        """Drops queued batches, ends the running one at its step's end, clears all slots, then calls `done` from the runner's thread."""
        with self._lock:
            self._epoch = epoch
            self._unanswered = 0
            replaced = self._drop_queue()
            self._queue.append(_Attach(epoch, done))
            self._lock.notify()
        for attach in replaced:
            attach.done()

    def submit(self, message: worker_pb2.StepBatch, sink: Sink) -> None:
        """Queues a batch; every granted step is answered to `sink`.

        One of another epoch, or beyond MAX_IN_FLIGHT, is answered as not run at once, and takes no place in the queue.
        """
        try:
            parsed: Batch | TokenloomError = parse_batch(message)
        except TokenloomError as error:
            parsed = error
        last = message.number + granted_steps(message) - 1
        work = _Work(
            message.epoch,
            message.number,
            message.predecessor,
            message,
            parsed,
            sink,
            time.monotonic_ns(),
            last=last,
            started=message.number - 1,
        )
        with self._lock:
            refusal = self._refusal(work)
            if refusal is None:
                self._unanswered += 1
                self._queue.append(work)
                self._lock.notify()
        if refusal is not None:
            for number in range(work.number, work.last + 1):
                outcome = worker_pb2.BATCH_OUTCOME_NOT_RUN
                _post(work, worker_pb2.StepResult(number=number, outcome=outcome, error=refusal.to_proto()))

    def _refusal(self, work: _Work) -> TokenloomError | None:
        """Why a batch may not even wait; None: it may. Called with the lock held."""
        if work.epoch != self._epoch:
            return TokenloomError(ErrorCode.STALE_BATCH, f"batch {work.number} is of epoch {work.epoch}, the current one is {self._epoch}")
        if self._unanswered >= MAX_IN_FLIGHT:
            return TokenloomError(ErrorCode.PROTOCOL_VIOLATION, f"batch {work.number} exceeds {MAX_IN_FLIGHT} in flight")
        return None

    def cut(self, message: worker_pb2.Cut, sink: Sink) -> None:
        """Ends a lease after `last_step`, or after the step that has started; answered when that one starts. Unknown leases are ignored."""
        with self._lock:
            work = self._find(message.epoch, message.number)
            if work is None:
                _log.info("cut of an unknown lease ignored", epoch=message.epoch, number=message.number)
                return
            work.last = max(min(work.last, message.last_step), work.started, work.number)
            work.announce = work.started < work.last
        if not work.announce:
            sink(_closed(work))

    def heartbeat(self) -> worker_pb2.Heartbeat:
        """What the runner is doing now."""
        with self._lock:
            running = self._current.started if self._current is not None and self._running_since_ns else 0
            elapsed = (time.monotonic_ns() - self._running_since_ns) // 1000 if running else 0
            queued = sum(isinstance(item, _Work) for item in self._queue)
            return worker_pb2.Heartbeat(
                epoch=self._epoch, last_step=self._last_step, running_step=running, running_us=elapsed, queued_batches=queued
            )

    def _drop_queue(self) -> list[_Attach]:
        """Empties the queue, with the lock held; returns the attaches in it, which somebody waits for."""
        attaches = [item for item in self._queue if isinstance(item, _Attach)]
        self._queue.clear()
        return attaches

    def _find(self, epoch: int, number: int) -> _Work | None:
        """The lease that begins at `number`: running, queued or the last that ended."""
        known = (self._current, self._finished, *self._queue)
        return next((work for work in known if isinstance(work, _Work) and (work.epoch, work.number) == (epoch, number)), None)

    def _main(self) -> None:
        try:
            steps = self._prepare()
        except BaseException as error:
            self._on_loaded(error)
            return
        self._on_loaded(steps)
        try:
            self._work(steps)
        except BaseException:
            _log.exception("the runner broke")
            self._on_broken()

    def _work(self, steps: Steps) -> None:
        """Takes what is queued, one after the other, until the runner is stopped."""
        while True:
            with self._lock:
                while not self._queue and not self._stopping:
                    self._lock.wait()
                if self._stopping:
                    return
                item = self._queue.popleft()
                self._current = item if isinstance(item, _Work) else None
            if isinstance(item, _Work):
                self._run_batch(steps, item)
            else:
                self._take_possession(steps, item)

    def _take_possession(self, steps: Steps, attach: _Attach) -> None:
        steps.clear()
        self._chain.restart(attach.epoch)
        with self._lock:
            self._finished, self._last_step = None, 0
        attach.done()

    def _run_batch(self, steps: Steps, work: _Work) -> None:
        stale = self._chain.check(work.epoch, work.number, work.predecessor)
        if stale is not None:
            self._refuse(steps, work, worker_pb2.BATCH_OUTCOME_NOT_RUN, stale)
        elif isinstance(work.parsed, TokenloomError):
            _log.error("batch refused", number=work.number, reason=work.parsed.message)
            self._refuse(steps, work, worker_pb2.BATCH_OUTCOME_FAILED, work.parsed)
            self._chain.broken(work.number, work.number, work.last)
        else:
            self._run_steps(steps, work, work.parsed)

    def _run_steps(self, steps: Steps, work: _Work, batch: Batch) -> None:
        while self._begin_step(work):
            index = work.started - work.number
            answered = steps.run(batch if not index else batch.later_step(index), work.arrived_ns, later=index > 0)
            failed = answered.result.outcome != worker_pb2.BATCH_OUTCOME_OK
            final = self._end_step(work, failed=failed)
            self._answer(work, answered)
            if self._log is not None:
                self._record(self._log, work, answered)
            if failed:
                self._break_lease(steps, work)
            elif final:
                self._chain.completed(work.number, work.last)

    def _record(self, log: StepLog, work: _Work, answered: Answered) -> None:
        first = work.started == work.number
        try:
            log.write(LoggedStep(answered.began_ns, work.message if first else None, answered.result))
        except OSError as error:
            _log.error("steps are recorded no more", reason=str(error))
            log.close()
            self._log = None

    def _begin_step(self, work: _Work) -> bool:
        """Starts the next step; False: the batch is over, or its epoch is."""
        with self._lock:
            if work.epoch != self._epoch or self._stopping:
                self._current = None
                return False
            if work.started >= work.last:
                if self._current is work:  # a cut came between two steps, when the one before was not the last yet
                    self._finish(work)
                    self._chain.completed(work.number, work.last)
                return False
            work.started += 1
            self._running_since_ns = time.monotonic_ns()
            announce = work.announce and work.started == work.last
        if announce:
            work.sink(_closed(work))
        return True

    def _end_step(self, work: _Work, *, failed: bool) -> bool:
        """Notes the end of a step, before its answer lets the scheduler send more. Returns whether it was the batch's last."""
        with self._lock:
            self._running_since_ns = 0
            final = failed or work.started >= work.last
            if not failed:
                self._last_step = work.started
            if final:
                self._finish(work)
            return final

    def _finish(self, work: _Work) -> None:
        """The batch is over; called with the lock held."""
        self._current, self._finished = None, work
        if work.epoch == self._epoch:
            self._unanswered -= 1

    def _break_lease(self, steps: Steps, work: _Work) -> None:
        """After a failed step: the rest of its lease is answered as not run."""
        at, last = work.started, work.last
        work.started = last
        self._chain.broken(work.number, at, last)
        error = TokenloomError(ErrorCode.STALE_BATCH, f"step {at} of the same lease failed")
        for number in range(at + 1, last + 1):
            self._answer(work, steps.refuse(number, worker_pb2.BATCH_OUTCOME_NOT_RUN, error))
        if work.announce:
            work.sink(_closed(work))

    def _refuse(self, steps: Steps, work: _Work, outcome: worker_pb2.BatchOutcome.ValueType, error: TokenloomError) -> None:
        """Answers every step of a batch that is not tried."""
        with self._lock:
            work.started = work.last
            self._finish(work)
        for number in range(work.number, work.last + 1):
            self._answer(work, steps.refuse(number, outcome if number == work.number else worker_pb2.BATCH_OUTCOME_NOT_RUN, error))
        if work.announce:
            work.sink(_closed(work))

    def _answer(self, work: _Work, answered: Answered) -> None:
        _post(work, answered.result)
        answered.after()


def _post(work: _Work, result: worker_pb2.StepResult) -> None:
    result.epoch = work.epoch
    work.sink(worker_pb2.RunResponse(result=result))


def _closed(work: _Work) -> worker_pb2.RunResponse:
    return worker_pb2.RunResponse(closed=worker_pb2.Closed(epoch=work.epoch, number=work.number, last_step=work.last))
