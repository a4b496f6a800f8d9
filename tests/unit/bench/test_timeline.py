"""What recorded steps say, on steps of known times."""

from __future__ import annotations

import pytest

from bench.stream import RequestRecord
from bench.timeline import Line, added_to_first_token_ms, hops_ms, moments, period_ratio
from services.worker.step_log import LoggedStep
from tokenloom.worker.v1 import worker_pb2


def step(began_ms: float, total_ms: int, idle_ms: int = 0, *, opens: tuple[int, ...] = (), slots: tuple[int, ...] = (0,)) -> LoggedStep:
    batch = worker_pb2.StepBatch(slots=slots, counts=[5 if slot in opens else 1 for slot in slots])
    batch.opens.extend(worker_pb2.Open(slot=slot) for slot in opens)
    timings = worker_pb2.StepTimings(
        total_us=total_ms * 1000, idle_us=idle_ms * 1000, forward_us=total_ms * 900, prepare_us=total_ms * 20, sample_us=total_ms * 30
    )
    return LoggedStep(int(began_ms * 1e6), batch, worker_pb2.StepResult(timings=timings))


RUN = [step(0, 50, opens=(0,)), step(52, 20, 2), step(73, 20, 1), step(200, 50, 107, opens=(1,), slots=(1,))]


def test_time_before_a_step_of_newcomers_alone_is_nobodys():
    line = Line.of(moments(RUN))
    assert (line.steps, line.rows, line.step_ms) == (4, 1.0, 35.0)
    assert (line.forward_ms, line.prepare_ms, line.sample_ms, line.rest_ms) == (31.5, 0.7, 1.05, 1.75)
    assert line.idle_ms == 0.75
    assert line.idle_share == pytest.approx(3 / 143, abs=1e-4)


def test_later_steps_of_a_lease_have_its_rows_and_a_batch_that_only_closes_is_no_step():
    later = LoggedStep(10**9, None, worker_pb2.StepResult(timings=worker_pb2.StepTimings(total_us=7)))
    closing = LoggedStep(10**9, worker_pb2.StepBatch(closes=[1]), worker_pb2.StepResult())
    run = moments([step(0, 50, slots=(0, 1, 2)), later, closing])
    assert [(moment.rows, moment.total_us) for moment in run] == [(3, 50_000), (3, 7)]


def test_a_step_costs_what_it_takes_more_than_alone_with_the_time_before_it():
    alone = moments([step(0, 40, opens=(0,)), step(40, 20), step(60, 20), step(80, 25, opens=(1,), slots=(1,))])
    assert period_ratio(moments(RUN), alone) == pytest.approx((1.1 + 1.05 + 0.2) / 2, abs=0.1)
    with pytest.raises(ValueError, match="4 steps were served, 2 ran alone"):
        period_ratio(moments(RUN), alone[:2])


def test_what_is_added_to_a_first_token_is_the_time_in_which_nothing_had_to_be_computed():
    run = moments(RUN)
    records = [RequestRecord(due=-0.004, chunk_times=[0.053]), RequestRecord(due=0.150, chunk_times=[]), RequestRecord(due=0.0)]
    assert added_to_first_token_ms(records, run, run) == pytest.approx(57 - 50 - 1, abs=0.01)
    assert added_to_first_token_ms(records[1:], run, run) is None


def test_the_ways_to_an_idle_worker_and_back_are_told_apart():
    run = moments(RUN)
    records = [RequestRecord(due=-0.004, chunk_times=[0.051]), RequestRecord(due=0.190, chunk_times=[0.256])]
    assert hops_ms(records, run) == (pytest.approx(7), pytest.approx(3.5))
    assert hops_ms([RequestRecord(due=0.060, chunk_times=[0.095])], run) is None, "it found the worker at work"
