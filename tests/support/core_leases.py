"""What stands before a ModelWorker: batches of one or several steps, and cuts, taken as the real worker's runner takes them.

Written from PROTOCOL.md rule 27 and the contract, not from the runner: a step starts, then ends; a cut counts for what has not started;
`closed` is said as soon as the last step starts, or at once where it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from tests.support.model_worker import ModelWorker
from tokenloom.worker.v1 import worker_pb2


@dataclass(slots=True)
class _Work:
    """A batch in the queue: steps up to `started` have started, up to `ended` they are answered, and `last` is the last wanted."""

    batch: worker_pb2.StepBatch
    started: int
    ended: int
    last: int
    announce: bool = False

    def closed(self) -> worker_pb2.RunResponse:
        return worker_pb2.RunResponse(closed=worker_pb2.Closed(epoch=self.batch.epoch, number=self.batch.number, last_step=self.last))


class LeaseRunner:
    """See the module. Every method returns what the worker sends because of it, in order."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self._queue: deque[_Work] = deque()
        self._finished: _Work | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._queue

    @property
    def next_step(self) -> int:
        """Number of the step that runs now, or next. Raises IndexError when idle."""
        return self._queue[0].ended + 1

    @property
    def is_later(self) -> bool:
        """Whether that is not the first step of its message."""
        return bool(self._queue) and self._queue[0].ended >= self._queue[0].batch.number

    def submit(self, batch: worker_pb2.StepBatch) -> None:
        """A batch arrives."""
        assert batch.lease_steps >= 1
        if batch.lease_steps > 1:
            assert all(batch.samples), "a lease is of sampled rows"
            assert set(batch.counts) == {1}, "a lease is of decode rows"
        before = batch.number - 1
        self._queue.append(_Work(batch, before, before, before + batch.lease_steps))

    def cut(self, cut: worker_pb2.Cut) -> list[worker_pb2.RunResponse]:
        """A cut arrives. One of a lease that is not known is ignored."""
        known = [*self._queue, *([self._finished] if self._finished else [])]
        work = next((work for work in known if (work.batch.epoch, work.batch.number) == (cut.epoch, cut.number)), None)
        if work is None:
            return []
        work.last = max(min(work.last, cut.last_step), work.started, work.batch.number)
        work.announce = work.started < work.last
        if not work.announce and work.ended == work.last and work is not self._finished:  # between two steps
            self._finish()
        return [] if work.announce else [work.closed()]

    def begin(self) -> list[worker_pb2.RunResponse]:
        """The next step starts, unless one runs."""
        if self.idle or (work := self._queue[0]).started > work.ended:
            return []
        work.started += 1
        return [work.closed()] if work.announce and work.started == work.last else []

    def end(self, **how: Any) -> list[worker_pb2.RunResponse]:
        """The step that runs, or else the next one, comes to its end; `how`: see ModelWorker.run. Nothing when idle."""
        if self.idle:
            return []
        said, work = self.begin(), self._queue[0]
        result = self.worker.run(self._step(work), later=work.started > work.batch.number, **how)
        work.ended = work.started
        said.append(worker_pb2.RunResponse(result=result))
        if result.outcome != worker_pb2.BATCH_OUTCOME_OK:
            said += self._break(work)
        if work.ended == work.last:
            self._finish()
        return said

    def _finish(self) -> None:
        self._finished = self._queue.popleft()

    def _break(self, work: _Work) -> list[worker_pb2.RunResponse]:
        """A step of a lease that did not complete takes the rest with it."""
        epoch, not_run = work.batch.epoch, worker_pb2.BATCH_OUTCOME_NOT_RUN
        rest = [worker_pb2.StepResult(epoch=epoch, number=number, outcome=not_run) for number in range(work.ended + 1, work.last + 1)]
        said = [worker_pb2.RunResponse(result=result) for result in rest]
        if work.announce and work.started < work.last:
            said.append(work.closed())
        work.started = work.ended = work.last
        return said

    @staticmethod
    def _step(work: _Work) -> worker_pb2.StepBatch:
        """What the step that has started does: in a later one the same rows again, and nothing that only the first one does."""
        batch = work.batch
        if work.started == batch.number:
            return batch
        number, rows = work.started, len(batch.slots)
        samples, blocks = batch.samples, [0] * rows
        return worker_pb2.StepBatch(
            epoch=batch.epoch,
            number=number,
            predecessor=number - 1,
            slots=batch.slots,
            counts=[1] * rows,
            samples=samples,
            new_block_counts=blocks,
        )
