"""Spans on their way to a collector that is away, hangs or fails: bounded, counted, quiet, and never in anybody's way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

from libs.telemetry import span_export
from libs.telemetry.otel_environment import ExportSettings
from libs.telemetry.span_export import Loss
from libs.telemetry.tracing import SpanRecord, TraceParent, Tracer

QUEUE = 64
SETTINGS = ExportSettings(queue_size=QUEUE, batch_size=16, delay_ms=10)


class Collector(SpanExporter):
    """Takes spans, hangs until it is let go, or fails, as it is told."""

    def __init__(self) -> None:
        self.taken: list[ReadableSpan] = []
        self.failing = False
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.go.wait()
        if self.failing:
            raise ConnectionError("no collector")
        self.taken += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.failing = True
        self.go.set()


@pytest.fixture
def lines(monkeypatch) -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    monkeypatch.setattr(span_export._log, "warning", lambda event, **fields: found.append((event, fields)))
    return found


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def tracer(collector) -> Iterator[Tracer]:
    tracer = Tracer("gateway", "g", exporters=[collector], settings=SETTINGS)
    yield tracer
    collector.go.set()
    tracer.shutdown()


def emit(tracer: Tracer, count: int) -> None:
    for _ in range(count):
        tracer.emit(SpanRecord("s", TraceParent.new(), 0, 1, 2))


def pipe_of(tracer: Tracer) -> span_export.SpanPipe:
    return tracer._pipes[0]


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_collector_that_hangs_costs_no_more_than_the_queue_and_every_other_span_is_counted(tracer, collector, lines):
    collector.go.clear()
    emit(tracer, 1)
    assert collector.entered.wait(10)
    began = time.monotonic()
    emit(tracer, 100_000)
    assert time.monotonic() - began < 20, "emitting never waits for the collector (its own export would take for ever)"
    pipe = pipe_of(tracer)
    assert pipe.pending == QUEUE
    assert pipe.losses == {Loss.QUEUE_FULL: 100_001 - QUEUE}
    assert [event for event, _ in lines] == ["spans are being lost; requests are not affected"], "one line, not one per span"
    collector.go.set()
    until(lambda: pipe.pending == 0)
    assert len(collector.taken) == QUEUE, "what was queued arrives when the collector is back"


def test_the_end_of_a_trouble_is_told_once_with_what_it_cost(tracer, collector, lines, monkeypatch):
    collector.failing = True
    emit(tracer, 5)
    pipe = pipe_of(tracer)
    until(lambda: pipe.pending == 0)
    emit(tracer, 5)
    until(lambda: pipe.losses[Loss.EXPORT_FAILED] == 10)
    collector.failing = False
    emit(tracer, 1)
    until(lambda: len(collector.taken) == 1 and pipe.pending == 0)
    assert len(lines) == 1, "one success just after a loss is not the end yet"
    monkeypatch.setattr(span_export, "CALM_SECONDS", 0.0)
    for expected in (2, 3):
        emit(tracer, 1)
        until(lambda expected=expected: len(collector.taken) == expected and pipe.pending == 0)
    until(lambda: len(lines) == 2)
    assert (lines[0][1]["target"], lines[0][1]["reason"]) == ("Collector", "ConnectionError('no collector')")
    assert (lines[1][0], lines[1][1]["lost"]) == ("spans arrive again", 10)


def test_lost_spans_are_a_metric_by_reason(tracer, collector, lines):
    registry = CollectorRegistry()
    tracer.count_in(registry)
    assert b'tokenloom:trace_spans_dropped_total{reason="export_failed"} 0.0' in generate_latest(registry)
    collector.failing = True
    emit(tracer, 3)
    until(lambda: pipe_of(tracer).losses.total() == 3)
    assert registry.get_sample_value("tokenloom:trace_spans_dropped_total", {"reason": "export_failed"}) == 3
    assert registry.get_sample_value("tokenloom:trace_spans_dropped_total", {"reason": "shutdown"}) == 0


def test_a_shutdown_exports_what_is_queued(collector):
    tracer = Tracer("gateway", "g", exporters=[collector], settings=ExportSettings(delay_ms=60_000))
    emit(tracer, 300)
    tracer.shutdown()
    assert len(collector.taken) == 300
    assert not pipe_of(tracer).losses


def test_a_hanging_collector_does_not_hold_up_the_end_and_what_it_cost_is_said(collector, lines, monkeypatch):
    monkeypatch.setattr(span_export, "SHUTDOWN_SECONDS", 0.0)
    collector.go.clear()
    tracer = Tracer("gateway", "g", exporters=[collector], settings=SETTINGS)
    emit(tracer, 40)
    assert collector.entered.wait(10)
    span_export.close_all(tracer._pipes, 0.05)
    assert pipe_of(tracer).losses[Loss.SHUTDOWN] + pipe_of(tracer).pending == 40
    assert lines == [("spans were lost at the end: the collector did not take them in time", {"lost": 40, "seconds": 0.05})]


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server whose kernel accepts connections and that never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def refusing_server() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("server", [silent_server, refusing_server])
def test_a_real_exporter_whose_collector_hangs_or_refuses_is_closed_in_time_and_says_one_line(server, lines, caplog):
    with server() as address:
        tracer = Tracer("gateway", "g", endpoints=[address], settings=ExportSettings(queue_size=256, batch_size=16, delay_ms=1))
        emit(tracer, 1000)
        began = time.monotonic()
        tracer.shutdown()
        assert time.monotonic() - began < 8, "2.5 s by design, whatever the collector does; its own time limit is 10 s a batch"
    pipe = pipe_of(tracer)
    assert pipe.losses.total() + pipe.pending == 1000
    assert len(lines) == 2, lines
    assert not caplog.records, "the SDK's own lines are in none of ours"
