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
        self._runner = Runner(lambda: Steps(load(config), WorkerMetrics(), lambda _span: None), loaded.put, self._broken.set)
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
        batches = [step.batch for step in steps if step.batch is not None]
        owed, sent, done = [batch.lease_steps or 1 for batch in batches], 0, list[LoggedStep]()
        finished, began_ns = 0, 0
        while finished < len(batches):
            while sent < min(len(batches), finished + MAX_IN_FLIGHT):
                self._runner.submit(self._own(batches[sent], first=not sent), answers.put)
                sent += 1
            result = answers.get().result
            if result.outcome != worker_pb2.BATCH_OUTCOME_OK:
                raise RuntimeError(f"step {result.number} did not run: {result.error.message}")
            began_ns += result.timings.idle_us * 1000
            done.append(LoggedStep(began_ns, batches[finished] if owed[finished] == (batches[finished].lease_steps or 1) else None, result))
            began_ns += result.timings.total_us * 1000
            owed[finished] -= 1
            finished += not owed[finished]
        return done

    def close(self) -> None:
        """Ends the thread."""
        self._runner.stop()

    def _own(self, batch: worker_pb2.StepBatch, *, first: bool) -> worker_pb2.StepBatch:
        mine = worker_pb2.StepBatch()
        mine.CopyFrom(batch)
        mine.epoch = self._epoch
        if first:  # what it follows is not part of the record
            mine.predecessor = 0
        return mine
