"""From a process to a collector without ever holding up the process: a bounded queue, an export thread, a count of what was lost.

The queue, the thread and the export itself are the SDK's. Around them stands what it lacks: spans that find the queue full are counted
exactly, its log (a line per failed try) becomes one line when spans begin to get lost and one when they arrive again, and a collector that
does not answer cannot hold up the process's end.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.telemetry.logs import get_logger
from libs.telemetry.otel_environment import ExportSettings

# What a shutdown gives the collector to take what is queued, and what it gives the export thread to notice that the time is up.
SHUTDOWN_SECONDS, _CUT_SECONDS = 2.0, 0.5
# Nothing lost for so long, and an export that succeeds: the trouble is over. Less, and a slow collector would fill the log.
CALM_SECONDS = 5.0
_SDK_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")

_log = get_logger("traces.export")


class Loss(enum.Enum):
    """Why a span did not arrive."""

    QUEUE_FULL = "queue_full"
    EXPORT_FAILED = "export_failed"
    SHUTDOWN = "shutdown"


class _Hearsay(logging.Filter):
    """Keeps the SDK's complaints out of the log and remembers each thread's last one: the reason in the one line that is written."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, str] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        self._last[threading.get_ident()] = record.getMessage()
        return False

    def take(self) -> str:
        """The calling thread's last complaint, once; empty when there is none."""
        return self._last.pop(threading.get_ident(), "")


_hearsay = _Hearsay()


class SpanPipe(SpanExporter):
    """An exporter behind a queue of `settings.queue_size` spans, the batch on its way included. `target` names the receiver in the log."""

    def __init__(self, exporter: SpanExporter, target: str, settings: ExportSettings) -> None:
        for name in _SDK_LOGGERS:
            logging.getLogger(name).addFilter(_hearsay)
        self._exporter, self._target, self._limit = exporter, target, settings.queue_size
        self._lock = threading.Lock()
        self._pending = 0
        self._losses: Counter[Loss] = Counter()
        self._trouble_since = self._last_loss = 0.0
        self._lost_before = 0
        self._cut = threading.Event()
        self._processor = BatchSpanProcessor(
            self,
            max_queue_size=settings.queue_size,
            schedule_delay_millis=settings.delay_ms,
            max_export_batch_size=settings.batch_size,
        )

    @property
    def losses(self) -> Counter[Loss]:
        """Spans lost so far, by reason."""
        with self._lock:
            return Counter(self._losses)

    @property
    def pending(self) -> int:
        """Spans that wait or are on their way."""
        return self._pending

    def offer(self, span: ReadableSpan) -> None:
        """Queues a span, or counts it as lost. Never blocks."""
        with self._lock:
            full = self._pending >= self._limit
            self._pending += not full
        if full:
            self._lose(Loss.QUEUE_FULL, 1, "the collector does not keep up: the queue of spans is full")
        else:
            self._processor.on_end(span)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the SDK's thread with one batch."""
        try:
            result = self._exporter.export(spans)
            reason = _hearsay.take()
        except Exception as error:  # an exporter's fault costs its batch, not the thread
            result, reason = SpanExportResult.FAILURE, repr(error)
        with self._lock:
            self._pending -= len(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lose(Loss.SHUTDOWN if self._cut.is_set() else Loss.EXPORT_FAILED, len(spans), reason or "the exporter failed")
        else:
            self._arrived()
        return result

    def _lose(self, why: Loss, count: int, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            begins = not self._trouble_since
            if begins:
                self._trouble_since, self._lost_before = now, self._losses.total()
            self._last_loss = now
            self._losses[why] += count
        if begins and why is not Loss.SHUTDOWN:
            _log.warning("spans are being lost; requests are not affected", target=self._target, reason=reason)

    def _arrived(self) -> None:
        now = time.monotonic()
        with self._lock:
            ends = self._trouble_since and now - self._last_loss >= CALM_SECONDS
            if not ends:
                return
            lost, lasted = self._losses.total() - self._lost_before, now - self._trouble_since
            self._trouble_since = 0.0
        _log.warning("spans arrive again", target=self._target, lost=lost, seconds=round(lasted, 1))

    def shutdown(self) -> None:
        """Called by the SDK when its queue is empty, and by `close` when the time is up: ends an export on its way."""
        if not self._cut.is_set():
            self._cut.set()
            self._exporter.shutdown()

    def close(self) -> threading.Thread:
        """Begins to export what is queued and then to close; the thread ends when that is done."""
        thread = threading.Thread(target=self._processor.shutdown, name="spans-close", daemon=True)
        thread.start()
        return thread


def close_all(pipes: Sequence[SpanPipe], seconds: float = SHUTDOWN_SECONDS) -> None:
    """Exports what is queued and stops, all at once, within `seconds` and half a second more; what does not arrive by then is lost."""
    deadline = time.monotonic() + seconds
    threads = [pipe.close() for pipe in pipes]
    for pipe, thread in zip(pipes, threads, strict=True):
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            pipe.shutdown()
    deadline += _CUT_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    lost = sum(pipe.losses[Loss.SHUTDOWN] + pipe.pending for pipe in pipes)
    if lost:
        _log.warning("spans were lost at the end: the collector did not take them in time", lost=lost, seconds=seconds)


class LostSpans(Collector):
    """The pipes' losses as a Prometheus counter."""

    def __init__(self, pipes: Sequence[SpanPipe]) -> None:
        self._pipes = pipes

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        family = CounterMetricFamily(
            "tokenloom:trace_spans_dropped",
            "Spans that a collector did not get, by reason: queue_full (it is too slow: give it CPU, or raise OTEL_BSP_MAX_QUEUE_SIZE), "
            "export_failed (it is away or refuses: the service's log says why), shutdown. Requests are not affected; traces have holes.",
            labels=["reason"],
        )
        for loss in Loss:
            family.add_metric([loss.value], sum(pipe.losses[loss] for pipe in self._pipes))
        yield family
