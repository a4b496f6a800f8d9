"""One step from batch to StepResult: stage, execute, commit. Belongs to the runner's thread; knows no queue and no stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from libs.clock import SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import SpanRecord
from services.worker.batch import Batch
from services.worker.constraints.prepared import Constraints
from services.worker.engine import Engine, Executed
from services.worker.metrics import WorkerMetrics
from services.worker.slots import Slot, SlotTable, StagedRow, StagedStep
from services.worker.spans import spans_of
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

_log = get_logger(__name__)

# Traces named in the log line of a step that failed.
MAX_LOGGED_TRACES = 8
# Receives finished spans; called from the runner's thread.
SpanSink = Callable[[SpanRecord], None]


@dataclass(frozen=True, slots=True)
class Answered:
    """A step's result, what remains to be done once it is on its way (metrics, spans), and when it began (monotonic ns; 0: it did not)."""

    result: worker_pb2.StepResult
    after: Callable[[], None]
    began_ns: int = 0


class Steps:
    """The slots of an engine and the steps that change them."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics, spans: SpanSink, constraints: Constraints | None = None) -> None:
        """`constraints`: whose table openings may name; None: nothing is prepared here."""
        self.constraints = constraints
        self._engine = engine
        self._metrics = metrics
        self._spans = spans
        self._clock = SystemClock()
        table = constraints.table if constraints is not None else None
        self._slots = SlotTable(engine.limits, tuple(engine.facts.eos_token_ids), engine.processors, constraints=table)
        self._previous_end_ns = 0

    @property
    def facts(self) -> worker_pb2.WorkerFacts:
        """What the engine can do."""
        return self._engine.facts

    def clear(self) -> None:
        """Forgets every sequence (a new attach); the cache needs no clearing, since only what is written again is read."""
        for slot in self._slots.clear():
            slot.timeline.lose_scheduler()
            self._emit(slot)
        self._previous_end_ns = 0

    def run(self, batch: Batch, arrived_ns: int, *, later: bool = False) -> Answered:
        """Runs one step; any failure becomes a FAILED result and changes no slot. `arrived_ns`: monotonic arrival of the batch.

        `later`: it is not the first step of its lease, so that rows which ended since are skipped.
        """
        began_ns, began_unix = self._clock.monotonic_ns(), self._clock.unix_ns()
        try:
            staged = self._slots.stage(batch, skip_ended=later)
            executed = self._engine.execute(staged.rows)
        except TokenloomError as error:
            _log.error("batch refused", number=batch.number, reason=error.message, trace_ids=self._traces(batch))
            return self._failed(batch, error)
        except (Exception, MemoryError) as error:
            _log.exception("step failed", number=batch.number, rows=len(batch.rows), trace_ids=self._traces(batch))
            code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.STEP_FAILED
            return self._failed(batch, TokenloomError(code, f"{type(error).__name__}: {error}"))
        stages = [(row, row.slot.in_prefill) for row in staged.rows]
        gone = self._slots.commit(staged, executed.tokens)
        ended_ns = self._clock.monotonic_ns()
        result = _result(batch, staged, executed)
        result.timings.CopyFrom(
            worker_pb2.StepTimings(
                queued_us=max(0, began_ns - arrived_ns) // 1000,
                prepare_us=executed.prepare_us,
                forward_us=executed.forward_us,
                sample_us=executed.sample_us,
                total_us=(ended_ns - began_ns) // 1000,
                idle_us=(began_ns - self._previous_end_ns) // 1000 if self._previous_end_ns else 0,
            )
        )
        self._previous_end_ns = ended_ns
        return Answered(result, lambda: self._account(result, stages, gone, began_unix), began_ns)

    def _account(
        self, result: worker_pb2.StepResult, stages: Sequence[tuple[StagedRow, bool]], gone: Sequence[Slot], began_unix: int
    ) -> None:
        """Metrics and spans of a step that ran. `stages`: its rows, and whether each was in its prefill; `gone`: sequences that left."""
        prefill = sum(row.count for row, in_prefill in stages if in_prefill)
        decode = sum(row.count for row, in_prefill in stages if not in_prefill)
        self._metrics.step(result, rows=len(stages), prefill_tokens=prefill, decode_tokens=decode, slots=len(self._slots))
        ended_unix = began_unix + result.timings.total_us * 1000
        device_us = result.timings.forward_us + result.timings.sample_us
        for row, in_prefill in stages:
            stage = row.slot.timeline.prefill if in_prefill else row.slot.timeline.decode
            stage.add(began_unix, ended_unix, device_us, row.count)
            if row.slot.ended or row.slot.full:
                self._emit(row.slot)
        for slot in gone:
            self._emit(slot)

    def refuse(self, batch_number: int, outcome: worker_pb2.BatchOutcome.ValueType, error: TokenloomError) -> Answered:
        """The answer to a step that is not tried."""
        result = worker_pb2.StepResult(number=batch_number, outcome=outcome, error=error.to_proto())
        return Answered(result, lambda: self._metrics.step(result, rows=0, prefill_tokens=0, decode_tokens=0, slots=len(self._slots)))

    def _traces(self, batch: Batch) -> list[str]:
        """The traces of the requests in a batch, for its line in the log: the first few, and those of the newcomers above all."""
        slots = [self._slots[row.slot] for row in batch.rows]
        traces = [*(opening.trace for opening in batch.opens), *(slot.timeline.trace for slot in slots if slot is not None)]
        return list(dict.fromkeys(f"{trace.trace_id:032x}" for trace in traces if trace is not None))[:MAX_LOGGED_TRACES]

    def _failed(self, batch: Batch, error: TokenloomError) -> Answered:
        self._previous_end_ns = time.monotonic_ns()
        return self.refuse(batch.number, worker_pb2.BATCH_OUTCOME_FAILED, error)

    def _emit(self, slot: Slot) -> None:
        """The spans of a sequence that is over, once."""
        if not slot.timeline.emitted:
            slot.timeline.emitted = True
            for record in spans_of(slot.timeline, slot.request):
                self._spans(record)


def _result(batch: Batch, staged: StagedStep, executed: Executed) -> worker_pb2.StepResult:
    outcomes, counts, tokens = bytearray(staged.outcomes), [0] * len(staged.outcomes), []
    for row in staged.rows:
        if row.index in executed.non_finite:
            outcomes[row.index] = worker_pb2.ROW_OUTCOME_NON_FINITE
        elif row.index in executed.dead_ends:
            outcomes[row.index] = worker_pb2.ROW_OUTCOME_DEAD_END
        elif row.index in executed.failed:
            refused = row.slot.steering is not None and row.slot.steering.refuses_args
            outcomes[row.index] = worker_pb2.ROW_OUTCOME_REFUSED_ARGS if refused else worker_pb2.ROW_OUTCOME_FAILED
        elif row.index in executed.tokens:
            counts[row.index] = 1
            if row.slot.constraint_complete and not row.slot.ended_by_token:
                outcomes[row.index] = worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE
            tokens.append(executed.tokens[row.index])
    return worker_pb2.StepResult(
        number=batch.number,
        outcome=worker_pb2.BATCH_OUTCOME_OK,
        row_outcomes=bytes(outcomes),
        token_counts=counts,
        token_ids=pack_ids(tokens),
        logprobs=_logprobs(len(counts), executed),
        prompt_positions=[
            worker_pb2.RowPromptPositions(row=told.row, first_position=told.first, logprobs=told.logprobs.to_proto())
            for told in executed.told
        ],
        dead_ends=_dead_ends(staged, executed),
    )


def _dead_ends(staged: StagedStep, executed: Executed) -> dict[int, str]:
    """Why constraints can go no further, by the row's index."""
    held = [(row.index, row.slot.progress) for row in staged.rows if row.index in executed.dead_ends]
    return {index: progress.broken for index, progress in held if progress is not None and progress.broken}


def _logprobs(rows: int, executed: Executed) -> list[common_pb2.Logprobs]:
    """One message per row of the batch, empty for those that did not ask; none at all where nobody did."""
    if not executed.logprobs:
        return []
    return [executed.logprobs[index].to_proto() if index in executed.logprobs else common_pb2.Logprobs() for index in range(rows)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory: then a smaller one may succeed. torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
