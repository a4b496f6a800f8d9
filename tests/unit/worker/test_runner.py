"""The runner's queue, chain, leases and failures, with an engine whose steps a test holds, fails or lets go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from libs.errors import ErrorCode
from libs.packing import pack_ids, unpack_ids
from libs.telemetry.tracing import SpanRecord, TraceParent
from services.worker.engine import Executed
from services.worker.metrics import WorkerMetrics
from services.worker.runner import Runner
from services.worker.slots import StagedRow
from services.worker.step_log import StepLog
from services.worker.steps import Steps
from tests.unit.worker.helpers import LIMITS
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

OK, NOT_RUN, FAILED = worker_pb2.BATCH_OUTCOME_OK, worker_pb2.BATCH_OUTCOME_NOT_RUN, worker_pb2.BATCH_OUTCOME_FAILED
WAIT = 20.0


class FakeEngine:
    """Draws slot's next token as (last token + 1); `gate` lets one step go per permit when it is not None."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.processors = ()
        self.facts = worker_pb2.WorkerFacts(eos_token_ids=[2], vocab_size=LIMITS.vocab_size, num_blocks=LIMITS.num_blocks)
        self.gate: threading.Semaphore | None = None
        self.entered: queue.Queue[int] = queue.Queue()
        self.failures: list[BaseException] = []
        self.non_finite: set[int] = set()

    def execute(self, rows: Sequence[StagedRow]) -> Executed:
        self.entered.put(len(rows))
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT)
        if self.failures:
            raise self.failures.pop(0)
        tokens = {row.index: int(row.slot.tokens[row.slot.known - 1]) + 1 for row in rows if row.sample}
        bad = frozenset(index for index in tokens if index in self.non_finite)
        return Executed({index: token for index, token in tokens.items() if index not in bad}, bad, 1, 2, 3)


class Bench:
    """A started runner, what it answered, and batches that follow on from each other."""

    def __init__(self, log: StepLog | None = None) -> None:
        self.engine = FakeEngine()
        self.metrics = WorkerMetrics()
        self.spans: queue.Queue[SpanRecord] = queue.Queue()
        self.answers: queue.Queue[worker_pb2.RunResponse] = queue.Queue()
        loaded = threading.Event()
        engine: Any = self.engine
        self.broken = threading.Event()
        self.runner = Runner(lambda: Steps(engine, self.metrics, self.spans.put), lambda _result: loaded.set(), self.broken.set, log)
        self.runner.start()
        assert loaded.wait(WAIT)
        self.attach(1)

    def attach(self, epoch: int) -> None:
        self.epoch = epoch
        clean = threading.Event()
        self.runner.attach(epoch, clean.set)
        if self.engine.gate is None:
            assert clean.wait(WAIT)

    def send(self, number: int, predecessor: int = 0, slots: Sequence[int] = (0,), **fields: Any) -> None:
        count = len(slots)
        batch = worker_pb2.StepBatch(
            **{
                "epoch": self.epoch,
                "number": number,
                "predecessor": predecessor,
                "slots": slots,
                "counts": [1] * count,
                "samples": b"\1" * count,
                "new_block_counts": [0] * count,
            }
            | fields
        )
        self.runner.submit(batch, self.answers.put)

    def open(self, number: int, slots: Sequence[int] = (0,), predecessor: int = 0, **sampling: Any) -> worker_pb2.StepResult:
        """Opens each slot with the prompt [10 + 10 * slot] and draws its first token."""
        self.send(number, predecessor, slots, opens=[self.opening(slot, **sampling) for slot in slots])
        return self.result()

    def opening(self, slot: int, trace: str = "", decode_span: int = 0, request_span: int = 0, **sampling: Any) -> worker_pb2.Open:
        return worker_pb2.Open(
            slot=slot,
            request=f"r{slot}",
            prompt_ids=pack_ids([10 + 10 * slot]),
            block_ids=pack_ids([slot]),
            sampling=common_pb2.SamplingParams(**({"max_tokens": 15} | sampling)),
            trace=common_pb2.TraceContext(traceparent=trace),
            decode_span_id=decode_span,
            request_span_id=request_span,
        )

    def result(self) -> worker_pb2.StepResult:
        answer = self.answers.get(timeout=WAIT)
        assert answer.WhichOneof("kind") == "result", answer
        return answer.result

    def kinds(self, count: int) -> list[tuple[str, int]]:
        """The next answers: ("ok" | "not_run" | "failed", step) or ("closed", last step)."""
        names = {OK: "ok", NOT_RUN: "not_run", FAILED: "failed"}
        answers = [self.answers.get(timeout=WAIT) for _ in range(count)]
        return [("closed", a.closed.last_step) if a.HasField("closed") else (names[a.result.outcome], a.result.number) for a in answers]

    def cut(self, number: int, last_step: int) -> None:
        self.runner.cut(worker_pb2.Cut(epoch=self.epoch, number=number, last_step=last_step), self.answers.put)

    def hold(self) -> threading.Semaphore:
        """From now on each step waits for a permit."""
        self.engine.gate = threading.Semaphore(0)
        while not self.engine.entered.empty():
            self.engine.entered.get()
        return self.engine.gate


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    if bench.engine.gate is not None:
        bench.engine.gate.release(100)
    bench.runner.stop()


def test_the_token_of_one_batch_is_fed_to_the_next_before_its_result_was_read(bench: Bench):
    bench.open(1, [0, 1])
    bench.send(2, 1, [0, 1])
    bench.send(3, 2, [1, 0])
    second, third = bench.result(), bench.result()
    assert unpack_ids(second.token_ids) == [12, 22]
    assert unpack_ids(third.token_ids) == [23, 13]
    assert list(third.token_counts) == [1, 1]


def test_a_result_says_where_the_time_went(bench: Bench):
    bench.open(1)
    bench.send(2, 1)
    timings = bench.result().timings
    assert (timings.prepare_us, timings.forward_us, timings.sample_us) == (1, 2, 3)
    assert timings.total_us >= 0
    assert timings.idle_us > 0


def test_a_step_that_failed_is_logged_with_the_traces_of_its_requests(bench: Bench, monkeypatch):
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("services.worker.steps._log.exception", lambda event, **fields: lines.append({"event": event, **fields}))
    traces = [f"{number:032x}" for number in (1, 2)]
    bench.send(1, opens=[bench.opening(0, trace=f"00-{traces[0]}-{7:016x}-01")])
    assert bench.result().outcome == OK
    bench.engine.failures = [RuntimeError("no kernel")]
    bench.send(2, 1, (0, 1), opens=[bench.opening(1, trace=f"00-{traces[1]}-{7:016x}-01")])
    assert bench.result().outcome == FAILED
    assert [(line["event"], sorted(line["trace_ids"])) for line in lines] == [("step failed", traces)]


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("no kernel"), ErrorCode.STEP_FAILED), (MemoryError(), ErrorCode.OUT_OF_MEMORY)])
def test_a_failed_step_leaves_slots_as_they_were_and_the_runner_alive(bench: Bench, error: BaseException, code: ErrorCode):
    bench.open(1)
    bench.engine.failures = [error]
    bench.send(2, 1, [0, 1], opens=[bench.opening(1)], closes=[0])
    failed = bench.result()
    assert failed.outcome == FAILED
    assert ErrorCode.from_number(failed.error.code) is code
    bench.send(3, 2)
    assert bench.result().outcome == NOT_RUN
    bench.send(4, 0, [0, 1])
    again = bench.result()
    assert list(again.row_outcomes) == [worker_pb2.ROW_OUTCOME_OK, worker_pb2.ROW_OUTCOME_NOT_RUN], "closes and opens did not happen"
    assert unpack_ids(again.token_ids) == [12]


def test_an_unsupported_batch_fails_with_its_reason_and_breaks_the_chain(bench: Bench):
    bench.open(1)
    bench.send(2, 1, draft_counts=[2])
    bench.send(3, 2)
    refused, after = bench.result(), bench.result()
    assert ErrorCode.from_number(refused.error.code) is ErrorCode.UNSUPPORTED
    assert (refused.outcome, after.outcome) == (FAILED, NOT_RUN)


def test_a_row_that_is_not_finite_yields_no_token_and_the_other_does(bench: Bench):
    bench.open(1, [0, 1])
    bench.engine.non_finite = {0}
    bench.send(2, 1, [0, 1])
    result = bench.result()
    assert list(result.row_outcomes) == [worker_pb2.ROW_OUTCOME_NON_FINITE, worker_pb2.ROW_OUTCOME_OK]
    assert (list(result.token_counts), unpack_ids(result.token_ids)) == ([0, 1], [22])


def test_a_stale_epoch_is_not_run(bench: Bench):
    bench.send(1, epoch=9)
    result = bench.result()
    assert (result.outcome, result.epoch) == (NOT_RUN, 9)
    assert ErrorCode.from_number(result.error.code) is ErrorCode.STALE_BATCH


def test_more_batches_than_agreed_are_not_run(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    for number in (2, 3, 4):
        bench.send(number, number - 1)
    assert bench.kinds(1) == [("not_run", 4)]
    gate.release(2)
    assert bench.kinds(2) == [("ok", 2), ("ok", 3)]


def test_an_attach_finishes_the_running_step_drops_the_rest_and_empties_the_slots(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    bench.send(2, 1)
    bench.send(3, 2)
    bench.engine.entered.get(timeout=WAIT)
    clean = threading.Event()
    bench.epoch = 2
    bench.runner.attach(2, clean.set)
    assert not clean.is_set()
    gate.release(10)
    assert clean.wait(WAIT)
    assert bench.kinds(1) == [("ok", 2)]
    bench.send(1)
    result = bench.result()
    assert (result.epoch, list(result.row_outcomes)) == (2, [worker_pb2.ROW_OUTCOME_NOT_RUN])


def test_a_lease_reports_each_of_its_steps(bench: Bench):
    bench.open(1)
    bench.send(2, 1, lease_steps=3)
    results = [bench.result() for _ in range(3)]
    assert [(item.number, unpack_ids(item.token_ids)) for item in results] == [(2, [12]), (3, [13]), (4, [14])]
    bench.send(5, 2)
    assert bench.kinds(1) == [("ok", 5)]


def test_a_row_that_ended_within_a_lease_is_skipped_and_others_go_on(bench: Bench):
    bench.open(1, [0, 1], stop_token_ids=[12])
    bench.send(2, 1, [0, 1], lease_steps=2)
    first, second = bench.result(), bench.result()
    assert unpack_ids(first.token_ids) == [12, 22]
    assert list(second.row_outcomes) == [worker_pb2.ROW_OUTCOME_NOT_RUN, worker_pb2.ROW_OUTCOME_OK]


def test_a_cut_lease_is_closed_when_its_last_step_starts(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    bench.send(2, 1, lease_steps=8)
    bench.engine.entered.get(timeout=WAIT)
    bench.cut(2, 4)
    gate.release(2)
    assert bench.kinds(3) == [("ok", 2), ("ok", 3), ("closed", 4)]
    gate.release()
    assert bench.kinds(1) == [("ok", 4)]
    gate.release()
    bench.send(5, 2)
    assert bench.kinds(1) == [("ok", 5)]


def test_a_cut_that_comes_too_late_is_answered_with_the_step_that_runs(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    bench.send(2, 1, lease_steps=8)
    gate.release()
    assert bench.kinds(1) == [("ok", 2)]
    for _ in range(2):
        bench.engine.entered.get(timeout=WAIT)
    bench.cut(2, 2)
    assert bench.kinds(1) == [("closed", 3)]
    gate.release()
    assert bench.kinds(1) == [("ok", 3)]


def test_a_cut_after_the_end_says_what_the_last_step_was_and_an_unknown_one_is_ignored(bench: Bench):
    bench.open(1)
    bench.send(2, 1, lease_steps=2)
    assert bench.kinds(2) == [("ok", 2), ("ok", 3)]
    bench.cut(2, 2)
    bench.cut(77, 78)
    assert bench.kinds(1) == [("closed", 3)]
    assert bench.answers.empty()


def test_a_lease_that_fails_midway_keeps_what_ran_and_reports_the_rest(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    bench.send(2, 1, lease_steps=4)
    gate.release()
    assert bench.kinds(1) == [("ok", 2)]
    bench.engine.failures = [RuntimeError("broken")]
    gate.release(5)
    assert bench.kinds(3) == [("failed", 3), ("not_run", 4), ("not_run", 5)]
    bench.send(6, 2)
    assert bench.kinds(1) == [("not_run", 6)]
    bench.send(7, 0)
    assert unpack_ids(bench.result().token_ids) == [13]


def test_the_heartbeat_tells_a_running_step_from_an_idle_runner(bench: Bench):
    bench.open(1)
    assert (bench.runner.heartbeat().last_step, bench.runner.heartbeat().running_step) == (1, 0)
    gate = bench.hold()
    bench.send(2, 1)
    bench.send(3, 2)
    bench.engine.entered.get(timeout=WAIT)
    beat = bench.runner.heartbeat()
    assert (beat.last_step, beat.running_step, beat.queued_batches, beat.epoch) == (1, 2, 1, 1)
    assert bench.runner.heartbeat().running_us >= beat.running_us
    gate.release(2)
    assert bench.kinds(2) == [("ok", 2), ("ok", 3)]


def test_stopping_lets_the_running_step_end(bench: Bench):
    bench.open(1)
    gate = bench.hold()
    bench.send(2, 1)
    bench.send(3, 2)
    bench.engine.entered.get(timeout=WAIT)
    stopper = threading.Thread(target=bench.runner.stop)
    stopper.start()
    gate.release(5)
    stopper.join(WAIT)
    assert not stopper.is_alive()
    assert bench.kinds(1) == [("ok", 2)]
    assert bench.answers.empty()


def test_a_model_that_does_not_load_is_reported():
    outcome: queue.Queue[object] = queue.Queue()
    error = ValueError("no such model")

    def fail() -> Steps:
        raise error

    runner = Runner(fail, outcome.put, lambda: outcome.put("broken"))
    runner.start()
    assert outcome.get(timeout=WAIT) is error
    runner.stop()


def test_a_request_leaves_a_prefill_and_a_decode_span_with_their_device_time(bench: Bench):
    trace, decode = TraceParent.new(), 4711
    bench.send(1, opens=[bench.opening(0, trace=str(trace), decode_span=decode)])
    for number in (2, 3):
        bench.send(number, number - 1)
        bench.result()
    bench.result()
    bench.send(4, 3, [], closes=[0])
    prefill, span = (bench.spans.get(timeout=WAIT) for _ in range(2))
    assert (prefill.name, prefill.parent_id, prefill.context.trace_id) == ("worker.prefill", trace.span_id, trace.trace_id)
    assert prefill.attributes["tokenloom.device_time_us"] == 5
    assert (span.name, span.parent_id) == ("worker.decode", decode)
    assert (span.attributes["tokenloom.steps"], span.attributes["tokenloom.tokens"]) == (2, 2)
    assert prefill.end_ns <= span.start_ns <= span.end_ns


def test_what_a_lost_scheduler_had_begun_belongs_to_the_request_for_the_schedulers_spans_never_come(bench: Bench):
    trace, request = TraceParent.new(), 815
    bench.send(1, opens=[bench.opening(0, trace=str(trace), decode_span=5, request_span=request)])
    bench.send(2, 1)
    bench.result()
    bench.result()
    bench.attach(2)
    spans = [bench.spans.get(timeout=WAIT) for _ in range(2)]
    assert [(span.name, span.parent_id) for span in spans] == [("worker.prefill", request), ("worker.decode", request)]
    assert {span.context.trace_id for span in spans} == {trace.trace_id}


def test_the_decode_span_comes_once_even_if_the_slot_closes_long_after_the_end(bench: Bench):
    bench.send(1, opens=[bench.opening(0, trace=str(TraceParent.new()), decode_span=5, stop_token_ids=[12])])
    bench.result()
    bench.send(2, 1)
    bench.result()
    assert [bench.spans.get(timeout=WAIT).name for _ in range(2)] == ["worker.prefill", "worker.decode"]
    bench.send(3, 2, [], closes=[0])
    bench.result()
    bench.send(4, 3, [])
    bench.result()
    assert bench.spans.empty()


def test_a_request_cancelled_within_its_prefill_leaves_its_span(bench: Bench):
    opening = bench.opening(0, trace=str(TraceParent.new()), decode_span=5)
    opening.prompt_ids = pack_ids([10, 11, 12])
    bench.send(1, opens=[opening], counts=[2], samples=b"\0")
    bench.send(2, 1, [], closes=[0])
    span = bench.spans.get(timeout=WAIT)
    assert (span.name, span.attributes["tokenloom.tokens"]) == ("worker.prefill", 2)


def test_metrics_count_steps_and_tokens_by_phase(bench: Bench):
    bench.open(1, [0, 1])
    bench.send(2, 1, [0, 1])
    bench.result()
    bench.send(2, 1)
    bench.result()
    bench.send(4, 0, [])
    bench.result()
    value = bench.metrics.registry.get_sample_value
    assert value("tokenloom:worker_tokens_total", {"phase": "prefill"}) == 2
    assert value("tokenloom:worker_tokens_total", {"phase": "decode"}) == 2
    assert value("tokenloom:batches_total", {"outcome": "not_run"}) == 1


def test_stale_batches_take_no_place_among_those_in_flight(bench: Bench):
    bench.open(1)
    for number in range(2, 6):
        bench.send(number, 1, epoch=9, lease_steps=2)
        assert bench.kinds(2) == [("not_run", number), ("not_run", number + 1)]
    bench.send(2, 1)
    assert bench.result().outcome == OK


def test_a_lease_cut_between_two_of_its_steps_is_over_and_its_successor_runs(bench: Bench):
    bench.open(1)
    for first in range(2, 8):  # more than may be in flight, in case one of them is never counted out

        def cut_at_once(response: worker_pb2.RunResponse, first: int = first) -> None:
            bench.answers.put(response)
            if response.HasField("result"):
                bench.cut(first, first)

        rows = {"slots": [0], "counts": [1], "samples": b"\1", "new_block_counts": [0]}
        message = worker_pb2.StepBatch(epoch=bench.epoch, number=first, predecessor=first - 1, lease_steps=4, **rows)
        bench.runner.submit(message, cut_at_once)
        assert bench.kinds(2) == [("ok", first), ("closed", first)]
    bench.send(8, 7)
    assert bench.result().outcome == OK


@pytest.mark.parametrize(("number", "steps"), [(2, 2**32 - 1), (2**64 - 2, 3), (2**64 - 1, 2)])
def test_a_lease_longer_than_any_is_refused_with_one_answer(bench: Bench, number: int, steps: int):
    bench.open(1)
    bench.send(number, 1, lease_steps=steps)
    answer = bench.result()
    assert (answer.number, answer.outcome) == (number, FAILED)
    assert answer.error.code == ErrorCode.PROTOCOL_VIOLATION.spec.code
    bench.attach(2)
    assert bench.open(1).outcome == OK
    assert not bench.broken.is_set()


def test_the_last_number_of_an_epoch_can_be_used(bench: Bench):
    bench.open(1)
    bench.send(2**64 - 2, 1, lease_steps=2)
    assert bench.kinds(2) == [("ok", 2**64 - 2), ("ok", 2**64 - 1)]


def test_a_thread_that_breaks_says_so(bench: Bench):
    def fail(_response: worker_pb2.RunResponse) -> None:
        raise RuntimeError("the sink is broken")

    bench.runner.submit(worker_pb2.StepBatch(epoch=1, number=1), fail)
    assert bench.broken.wait(WAIT)
