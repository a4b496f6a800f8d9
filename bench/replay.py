"""A worker's runner alone, in this process: no gRPC, no scheduler, no client; it runs recorded batches again, two queued at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from services.worker.config import WorkerConfig
from services.worker.engine import MAX_IN_FLIGHT, load
from services.worker.metrics import WorkerMetrics
from services.worker.runner import Runner
from services.worker.step_log import LoggedStep
from services.worker.steps import Steps
from tokenloom.worker.v1 import worker_pb2


class LoneRunner:
    """A loaded runner. `replay` may be called again and again."""

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the model. Raises what loading raises."""
        loaded: SimpleQueue[Steps | BaseException] = SimpleQueue()
        self._broken = threading.Event()
        self._runner = Runner(lambda: _loaded(config), loaded.put, self._broken.set)
        self._runner.start()
        self._epoch = 0
        outcome = loaded.get()
        if isinstance(outcome, BaseException):
            raise outcome

    def replay(self, steps: Sequence[LoggedStep]) -> list[LoggedStep]:
        """Runs the batches of `steps` from empty slots; the steps as they went here. Raises RuntimeError when one is not run."""
        self._epoch += 1
        clean = threading.Event()
        self._runner.attach(self._epoch, clean.set)
        clean.wait()
        answers: SimpleQueue[worker_pb2.RunResponse] = SimpleQueue()
        batches, owed = _as_run(steps)
        granted, sent, done = list(owed), 0, list[LoggedStep]()
        finished, began_ns = 0, 0
        while finished < len(batches):
            while sent < min(len(batches), finished + MAX_IN_FLIGHT):
                self._runner.submit(self._own(batches[sent], granted[sent], first=not sent), answers.put)
                sent += 1
            result = answers.get().result
            if result.outcome != worker_pb2.BATCH_OUTCOME_OK:
                raise RuntimeError(f"step {result.number} did not run: {result.error.message}")
            began_ns += result.timings.idle_us * 1000
            done.append(LoggedStep(began_ns, batches[finished] if owed[finished] == granted[finished] else None, result))
            began_ns += result.timings.total_us * 1000
            owed[finished] -= 1
            finished += not owed[finished]
        return done

    def close(self) -> None:
        """Ends the thread."""
        self._runner.stop()

    def _own(self, batch: worker_pb2.StepBatch, steps: int, *, first: bool) -> worker_pb2.StepBatch:
        mine = worker_pb2.StepBatch()
        mine.CopyFrom(batch)
        mine.epoch, mine.lease_steps = self._epoch, steps
        if first:  # what it follows is not part of the record
            mine.predecessor = 0
        return mine


def _loaded(config: WorkerConfig) -> Steps:
    """As a worker's service does it; the runner's thread calls this, and keeps to the core that it is given here."""
    engine = load(config)
    engine.settle()
    return Steps(engine, WorkerMetrics(), lambda _span: None)


def _as_run(steps: Sequence[LoggedStep]) -> tuple[list[worker_pb2.StepBatch], list[int]]:
    """The batches, and how many steps each of them ran: a lease that was cut ran fewer than it was granted."""
    batches, ran = list[worker_pb2.StepBatch](), list[int]()
    for step in steps:
        if step.batch is not None:
            batches.append(step.batch)
            ran.append(0)
        if ran:  # the record may begin within a lease
            ran[-1] += 1
    return batches, ran
