"""Prometheus metrics of a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from libs.store.metrics import StoreMetrics
from libs.telemetry.metrics import STEP_BUCKETS, TOKEN_BUCKETS, new_registry
from tokenloom.worker.v1 import worker_pb2

_PREFIX = "tokenloom:"
_OUTCOMES = {
    worker_pb2.BATCH_OUTCOME_OK: "ok",
    worker_pb2.BATCH_OUTCOME_NOT_RUN: "not_run",
    worker_pb2.BATCH_OUTCOME_FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Makes metrics of one registry, of the kinds that a worker has."""

    registry: CollectorRegistry

    def step_time(self, name: str, text: str) -> Histogram:
        """Seconds, in buckets for steps."""
        return Histogram(_PREFIX + name, text, buckets=STEP_BUCKETS, registry=self.registry)

    def amount(self, name: str, text: str) -> Histogram:
        """Tokens or rows of a step."""
        return Histogram(_PREFIX + name, text, buckets=TOKEN_BUCKETS, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """What only grows."""
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str) -> Gauge:
        """What is as it is now."""
        return Gauge(_PREFIX + name, text, registry=self.registry)


class CompilerMetrics:
    """How the compilers of constraints fare; see libs.helper_pool.PoolObserver."""

    def __init__(self, kinds: _Kinds) -> None:
        self._running = kinds.gauge(
            "worker_constraint_compilers", "Processes that compile constraints. Below --constraint-compilers for long: see the log."
        )
        self._busy = kinds.gauge(
            "worker_constraint_compilers_busy", "Those that compile now. All of them for long: raise --constraint-compilers."
        )
        self._queue = kinds.step_time(
            "worker_constraint_queue_seconds", "Time constraints wait for a compiler. Seconds: raise --constraint-compilers."
        )
        self._restarts = kinds.counter(
            "worker_constraint_compiler_restarts",
            "Compilers replaced. timeout or died: a client's constraint reached its limit, which protects the others; "
            "yielded: it took long, and others waited; see the log.",
            "reason",
        )

    def size(self, running: int) -> None:
        """See PoolObserver."""
        self._running.set(running)

    def busy(self, change: int) -> None:
        """See PoolObserver."""
        self._busy.inc(change)

    def taken(self, queued_seconds: float) -> None:
        """See PoolObserver."""
        self._queue.observe(queued_seconds)

    def replaced(self, reason: str) -> None:
        """See PoolObserver."""
        self._restarts.labels(reason).inc()


# Steps that wait to be counted: a millisecond's work when it is done at once.
MOST_WAITING = 32


class _Waiting(Collector):
    """What is yet to be counted, in order. A collector of nothing, so that each reading of its registry counts it first.

    Between two forward passes, which leave nothing in the caches, counting a step takes five times as long as behind another one.
    """

    def __init__(self) -> None:
        self._calls = deque[Callable[[], None]]()

    def add(self, call: Callable[[], None]) -> None:
        """Keeps a call; makes all of them when they are many."""
        self._calls.append(call)
        if len(self._calls) >= MOST_WAITING:
            self._make()

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        self._make()
        return ()

    def _make(self) -> None:
        for _ in range(len(self._calls)):
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread has taken the last one
                return
            call()


class WorkerMetrics:
    """All metrics of one worker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self._waiting = _Waiting()
        registry.register(self._waiting)  # first of all: who reads the others has them counted by then
        self.store = StoreMetrics(registry)

        kinds = _Kinds(registry)
        self._make_steps(kinds)
        self._slots = kinds.gauge("worker_slots_used", "Sequences in slots. At --max-num-seqs, others wait.")
        self._blocks = kinds.gauge("worker_kv_blocks", "KV blocks on the device: the capacity that the scheduler shares out.")
        self._load = kinds.gauge("worker_weights_load_seconds", "Time the weights took to load. Long: slow disk, or a quantised file.")
        self._constraints = kinds.counter(
            "worker_constraints",
            "Constraints by what became of them. busy: raise --constraint-compilers or --constraint-queue; refused: clients' mistakes.",
            "outcome",
        )
        self._compile = kinds.step_time(
            "worker_constraint_compile_seconds",
            "Compiling of a constraint, beside the steps. High values: clients send grammars of thousands of rules.",
        )
        self.compilers = CompilerMetrics(kinds)
        for outcome in ("compiled", "cached", "refused", "busy"):
            self._constraints.labels(outcome)

    def _make_steps(self, kinds: _Kinds) -> None:
        self._step = kinds.step_time(
            "worker_step_seconds", "Whole step. Long steps make inter-token latency: lower --max-num-batched-tokens or add workers."
        )
        self._forward = kinds.step_time(
            "worker_forward_seconds", "Forward pass of a step. If it grows at equal batch size, something else uses this machine's CPUs."
        )
        self._sample = kinds.step_time(
            "worker_sample_seconds", "Sampling of a step. High values: wide top_p without top_k sorts the vocabulary."
        )
        self._idle = kinds.counter(
            "worker_idle_seconds",
            "Time between steps while batches keep coming. If it rises under load, the scheduler or the network is the bottleneck.",
        )
        self._tokens_per_batch = kinds.amount(
            "worker_batch_tokens", "Tokens computed per step. Always at the limit: prefill-bound, add workers."
        )
        self._rows_per_batch = kinds.amount(
            "worker_batch_rows", "Sequences per step. Low under load: raise --max-num-seqs or the KV cache."
        )
        self._tokens = kinds.counter(
            "worker_tokens", "Tokens computed, by phase. Far above what clients are billed: recomputation.", "phase"
        )
        self._batches = kinds.counter(
            "batches", "Steps by outcome. not_run follows a failed one or a new leader; failed needs a look at the worker's log.", "outcome"
        )
        for outcome in _OUTCOMES.values():
            self._batches.labels(outcome)
        for phase in ("prefill", "decode"):
            self._tokens.labels(phase)

    def constraint(self, outcome: str, seconds: float) -> None:
        """What became of a constraint; `seconds` of compiling where it was compiled."""
        self._constraints.labels(outcome).inc()
        if outcome == "compiled":
            self._compile.observe(seconds)

    def loaded(self, seconds: float, blocks: int) -> None:
        """The model is there."""
        self._load.set(seconds)
        self._blocks.set(blocks)

    def step(self, result: worker_pb2.StepResult, *, rows: int, prefill_tokens: int, decode_tokens: int, slots: int) -> None:
        """A step was answered. It is counted when the metrics are read, or with those that follow it: see `_Waiting`."""
        took = result.timings
        times = took.total_us, took.forward_us, took.sample_us, took.idle_us
        self._waiting.add(partial(self._count, result.outcome, times, rows, prefill_tokens, decode_tokens, slots))

    def _count(
        self,
        outcome: worker_pb2.BatchOutcome.ValueType,
        times: tuple[int, int, int, int],
        rows: int,
        prefill_tokens: int,
        decode_tokens: int,
        slots: int,
    ) -> None:
        """`times`: microseconds of the whole step, its forward pass, its sampling and the idle time before it."""
        self._batches.labels(_OUTCOMES[outcome]).inc()
        self._slots.set(slots)
        if outcome != worker_pb2.BATCH_OUTCOME_OK:
            return
        total_us, forward_us, sample_us, idle_us = times
        self._step.observe(total_us / 1e6)
        self._forward.observe(forward_us / 1e6)
        self._sample.observe(sample_us / 1e6)
        self._idle.inc(idle_us / 1e6)
        self._rows_per_batch.observe(rows)
        self._tokens_per_batch.observe(prefill_tokens + decode_tokens)
        self._tokens.labels("prefill").inc(prefill_tokens)
        self._tokens.labels("decode").inc(decode_tokens)
