from __future__ import annotations

from prometheus_client import generate_latest

from services.worker.metrics import MOST_WAITING, WorkerMetrics
from tokenloom.worker.v1 import worker_pb2


def count_step(metrics: WorkerMetrics) -> None:
    result = worker_pb2.StepResult(outcome=worker_pb2.BATCH_OUTCOME_OK)
    metrics.step(result, rows=2, prefill_tokens=5, decode_tokens=1, slots=2)


def test_who_reads_the_metrics_finds_every_step_that_was_answered():
    metrics = WorkerMetrics()
    for steps in (1, 2):
        count_step(metrics)
        text = generate_latest(metrics.registry).decode()
        assert f'tokenloom:batches_total{{outcome="ok"}} {steps}.0' in text
        assert f'tokenloom:worker_tokens_total{{phase="prefill"}} {5 * steps}.0' in text
        assert "tokenloom:worker_slots_used 2.0" in text


def test_steps_are_counted_unread_too_once_they_are_many():
    metrics = WorkerMetrics()
    batches = metrics._batches.labels("ok")._value
    for _ in range(MOST_WAITING - 1):
        count_step(metrics)
    assert batches.get() == 0
    count_step(metrics)
    assert batches.get() == MOST_WAITING
