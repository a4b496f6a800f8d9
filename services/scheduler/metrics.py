"""Metrics of the scheduler. What the core counts is read from it at each scrape, in the loop's thread, so that the sums always agree."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from libs.errors import ErrorCode
from libs.store.metrics import StoreMetrics
from libs.telemetry.metrics import LATENCY_BUCKETS, STEP_BUCKETS, TOKEN_BUCKETS, new_registry
from services.scheduler.core.request import CancelReason, Request, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason

_SNAPSHOT_TIMEOUT = 5.0
PREPARE_OUTCOMES = ("compiled", "cached", "invalid", "busy", "failed", "unanswered")
_LEASE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class SchedulerMetrics:
    """Histograms and counters of events; `watch` adds the core's own numbers."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.store = StoreMetrics(self.registry)
        histogram = self._histogram
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first dispatch. Grows: more blocks or sequences.")
        self.prefill_time = histogram("request_prefill_time_seconds", "First dispatch to first token. Grows: prefix caching.")
        self.decode_time = histogram("request_decode_time_seconds", "First token to the end. Grows: fewer sequences per step.")
        self.cancel_to_free = histogram(
            "cancel_to_free_seconds",
            "A cancel's arrival to its blocks being free: at most the batches already sent. Grows: long steps.",
        )
        self.step_time = histogram(
            "scheduler_step_seconds", "Dispatch of a batch, or the end of the step before it in its lease, to its result.", STEP_BUCKETS
        )
        self.plan_time = histogram("scheduler_plan_seconds", "Planning and sending a step. Over 1 ms: profile it.", STEP_BUCKETS)
        self.apply_time = histogram("scheduler_apply_seconds", "Applying a result. Over 1 ms: profile it.", STEP_BUCKETS)
        self.lead_time = histogram(
            "dispatch_lead_seconds",
            "How long before the previous result a step was sent (dispatch-ahead); 0: after it.",
            STEP_BUCKETS,
        )
        self.lease_steps = histogram(
            "lease_steps", "Steps granted in one message. Always 1 though --max-lease-steps is more: somebody always waits.", _LEASE_BUCKETS
        )
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of a step.", TOKEN_BUCKETS)
        self.generation_tokens = self._counter("generation_tokens", "Output tokens that requests took.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.success = self._counter("request_success", "Requests that finished, by reason.", ["finished_reason"])
        self.cancelled = self._counter("request_cancelled", "Requests cancelled, by reason. Soars: timeouts, slow clients.", ["reason"])
        self.rejected = self._counter("request_rejected", "Submits refused, by reason. Soars: scale out, limit clients.", ["reason"])
        self.failed = self._counter("request_failed", "Accepted requests that failed, by error. Any: read the log.", ["reason"])
        self.prepares = self._counter(
            "constraint_prepares",
            "Constraints that workers were asked to compile, by outcome. busy: more workers; failed, unanswered: read a worker's log.",
            ["outcome"],
        )
        self.prepare_time = histogram(
            "constraint_prepare_seconds", "A worker's answer about a constraint. Grows: schemas that compile slowly, or too many at once."
        )
        self.worker_losses = self._counter("worker_losses", "Worker streams that were lost. Any: read the worker's log.")
        self.sessions = Gauge("tokenloom:gateway_sessions", "Open gateway sessions.", registry=self.registry)
        self.workers = Gauge("tokenloom:workers_attached", "Attached worker groups. 0: requests wait.", registry=self.registry)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """All series exist from the start: a rate over one that is born with its first event misses that event."""
        for finish in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONSTRAINT_COMPLETE):
            self.success.labels(finish.value)
        for reason in (*(reason.value for reason in CancelReason), "deadline"):
            self.cancelled.labels(reason)
        for outcome in PREPARE_OUTCOMES:
            self.prepares.labels(outcome)
        for code in ErrorCode:
            self.rejected.labels(code.spec.label)
            self.failed.labels(code.spec.label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        return Histogram(f"tokenloom:{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"tokenloom:{name}", text, list(labels), registry=self.registry)

    def watch(self, loop: asyncio.AbstractEventLoop, state: Callable[[], SchedulerState | None]) -> None:
        """Adds the core's numbers, read in `loop`'s thread."""
        self.registry.register(_CoreCollector(loop, state))

    def ended(self, request: Request, exemplar: dict[str, str] | None = None) -> None:
        """Counts an accepted request's ending and its stages; `exemplar` leads to its trace."""
        line, ending = request.timeline, request.ending
        if ending is None:
            return
        match ending.reason:
            case FinishReason.CANCELLED | FinishReason.DEADLINE:
                self.cancelled.labels(ending.cancel.value if ending.cancel else "deadline").inc()
            case FinishReason.FAILED:
                self.failed.labels(ending.error.code.spec.label if ending.error else "internal").inc()
            case reason:
                self.success.labels(reason.value).inc()
        self.prompt_tokens.inc(len(request.prompt_ids))
        self.queue_time.observe(((line.dispatched_ns or line.ended_ns) - line.received_ns) / 1e9, exemplar)
        if line.first_token_ns and line.dispatched_ns:
            self.prefill_time.observe((line.first_token_ns - line.dispatched_ns) / 1e9, exemplar)
            self.decode_time.observe((line.ended_ns - line.first_token_ns) / 1e9, exemplar)


class _CoreCollector:
    def __init__(self, loop: asyncio.AbstractEventLoop, state: Callable[[], SchedulerState | None]) -> None:
        self._loop = loop
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The core's numbers as of one instant between two events."""
        snapshot: concurrent.futures.Future[list[Metric]] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: snapshot.set_result(list(_read(self._state()))))
        yield from snapshot.result(_SNAPSHOT_TIMEOUT)

    def describe(self) -> list[Metric]:
        """Nothing: registration must not wait for the loop."""
        return []


def _read(state: SchedulerState | None) -> Iterator[Metric]:
    if state is None:
        return
    counters = state.counters
    yield _gauge("num_requests_running", "Requests that stand in a worker group.", state.running)
    waiting = [*state.queue, *state.checking]
    yield _gauge("num_requests_waiting", "Requests in the queue, or being checked. Grows: more workers or blocks.", len(waiting))
    yield _gauge("num_requests_live", "Accepted requests that have not ended.", len(state.requests))
    waits = GaugeMetricFamily("tokenloom:num_requests_waiting_by_reason", "Waiting requests by what they wait for.", labels=["reason"])
    for reason in WaitReason:
        waits.add_metric([reason.value], sum(request.wait_reason is reason for request in waiting))
    yield waits
    for name, value, text in (
        ("requests_admitted", counters.admitted, "Requests accepted into the queue."),
        ("requests_finished", counters.finished, "Accepted requests that came to a natural end."),
        ("requests_failed", counters.failed, "Accepted requests that failed."),
        ("requests_cancelled", counters.cancelled, "Accepted requests that were cancelled or passed their deadline."),
        ("requests_resumed", counters.resumed, "Admissions after a preemption, a lost worker or a failed batch."),
        ("prefix_cache_queries", counters.prefix_queries, "Prompt tokens looked up in the prefix cache, once per prompt."),
        ("prefix_cache_hits", counters.prefix_hits, "Prompt tokens found there. Under 10% of queries: put the stable text first."),
        ("sibling_shared_tokens", counters.sibling_shared, "Prompt tokens that further choices (n > 1) took from the first one's blocks."),
        ("stale_results", counters.stale_results, "Late or duplicate results that were ignored."),
        ("unknown_cancels", counters.unknown_cancels, "Cancels of requests that had ended already."),
        ("scheduler_steps", counters.steps, "Batches planned, and further steps of leases that ran."),
        ("scheduler_mixed_steps", counters.mixed_steps, "Batches that held prefill and decode rows."),
        ("leases", counters.leases, "Batches that granted several steps."),
        ("cut_leases", counters.cut_leases, "Leases that ended early. Nearly all of leases: fewer --max-lease-steps."),
        ("stale_closed", counters.stale_closed, "Answers to cuts that came too late or twice and were ignored."),
        ("stale_prepared", counters.stale_prepared, "Answers about constraints that nobody waited for any more."),
    ):
        yield CounterMetricFamily(f"tokenloom:{name}", text, value=value)
    yield _gauge("constraints_kept", "Constraints that workers keep compiled, wanted or idle.", len(state.checking.checks))
    preemptions = CounterMetricFamily(
        "tokenloom:num_preemptions", "Requests sent back to the queue. Frequent: more cache memory, fewer sequences.", labels=["reason"]
    )
    preemptions.add_metric(["no_blocks"], counters.preemptions)
    yield preemptions
    yield from _blocks(state)


def _blocks(state: SchedulerState) -> Iterator[Metric]:
    total = sum(group.ledger.num_blocks for group in state.groups.values())
    held = sum(group.ledger.in_use for group in state.groups.values())
    yield _gauge(
        "kv_cache_usage_perc",
        "Share of KV blocks held, 0 to 1. Over 0.9: preemptions are near.",
        held / total if total else 0,
    )
    blocks = GaugeMetricFamily("tokenloom:kv_blocks", "KV blocks by state.", labels=["state"])
    ledgers = [group.ledger for group in state.groups.values()]
    blocks.add_metric(["held"], held)
    blocks.add_metric(["draining"], sum(ledger.draining for ledger in ledgers))
    blocks.add_metric(["cached"], sum(ledger.cached for ledger in ledgers))
    blocks.add_metric(["free"], sum(ledger.available - ledger.cached for ledger in ledgers))
    yield blocks


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tokenloom:{name}", text, value=value)
