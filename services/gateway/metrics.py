"""The gateway's metrics, named as vLLM's users know them and seen from where the client stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from libs.errors import ErrorCode
from libs.store.metrics import StoreMetrics
from libs.telemetry.metrics import LATENCY_BUCKETS, STEP_BUCKETS, TOKEN_BUCKETS, new_registry
from tokenloom.common.v1 import common_pb2

# The values that labels can take. All their series exist from the start: a rate over a series that is born with its first event
# misses that event, and an alert on it would come one failure late.
STAGES = ("tokenize", "lost", "transport", "queue", "prefill", "decode", "stream")
FINISHED = ("stop", "length")
CANCELLED = (
    *(name.removeprefix("CANCEL_REASON_").lower() for name, number in common_pb2.CancelReason.items() if number),
    "deadline",
)
STRAY = ("delta", "ending", "accepted", "frame", "positions")


class GatewayMetrics:
    """All metrics of one gateway process, in a registry of their own. Times are in seconds; `model_name` is the first served name."""

    def __init__(self, model_name: str) -> None:
        self.registry = new_registry()
        self.store = StoreMetrics(self.registry)
        self._labels = {"model_name": model_name}
        self._latencies()
        self._requests()
        self._mesh()
        self._begin_at_zero()

    def _latencies(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Request read to first token received. High: compare request_stage_seconds; queue -> capacity, tokenize -> tokenizer pool.",
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between a request's successive token deliveries. A long tail: prefills stall decodes; lower max_num_batched_tokens.",
            STEP_BUCKETS,
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time of a finished request's tokens after the first. High: fewer concurrent sequences (max_num_seqs) or more workers.",
            STEP_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Request read to last byte sent. Rises with output length; compare with its stages."
        )
        self.stage = Histogram(
            "tokenloom:request_stage_seconds",
            "Where finished requests spent their time; the stages add up to e2e_request_latency_seconds. Mend the largest first.",
            ["model_name", "stage"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.tokenizer_call = self._histogram(
            "tokenizer_call_seconds", "Round trip of an encode call. High with a low encode time: raise tokenizer_pool_size or replicas."
        )

    def _requests(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests. The rate is the prefill load.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens received. The rate is the throughput.")
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt length of ended requests. Long tails want chunked prefill and prefix caching.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output length of ended requests. Near max_model_len: clients set no max_tokens.", TOKEN_BUCKETS
        )
        self.success = self._counter(
            "request_success", "Sequences finished, by reason. `length` rising: raise max_tokens.", "finished_reason"
        )
        self.cancelled = self._counter(
            "request_cancelled", "Sequences cancelled, by reason. client_disconnected rising: clients give up; look at TTFT.", "reason"
        )
        self.rejected = self._counter(
            "request_rejected", "Requests answered with an error, by its label. over_window, queue_full: add capacity.", "reason"
        )
        self.http_requests = Counter(
            "tokenloom:http_requests",
            "HTTP responses by route and status. Watch 5xx; 499 means the client left before the answer.",
            ["path", "status"],
            registry=self.registry,
        )
        self.open_streams = Gauge(
            "tokenloom:gateway_open_streams",
            "Generation requests open at this gateway. Compare with num_requests_running + num_requests_waiting.",
            registry=self.registry,
        )

        self.outstanding = Gauge(
            "tokenloom:gateway_outstanding",
            "What requests hold of the scheduler's window: sequences, and tokens (prompt plus max_tokens). At gateway_window: 429s.",
            ["unit"],
            registry=self.registry,
        )
        self.window = Gauge(
            "tokenloom:gateway_window",
            "What the scheduler lets this gateway have outstanding, by demand. 0: no session. Always full: add workers, not gateways.",
            ["unit"],
            registry=self.registry,
        )

    def _mesh(self) -> None:
        self.session_up = Gauge(
            "tokenloom:gateway_session_up",
            "1 while the scheduler's session stands. 0: requests wait or get 503.",
            registry=self.registry,
        )
        self.session_losses = Counter(
            "tokenloom:gateway_session_losses",
            "Sessions lost, live requests resubmitted. Look at the scheduler.",
            registry=self.registry,
        )
        self.resumed = Counter(
            "tokenloom:gateway_resumed_requests",
            "Requests resubmitted with the tokens they had. Clients saw a pause, no error.",
            registry=self.registry,
        )
        self.stray = Counter(
            "tokenloom:gateway_stray_messages",
            "Deltas, endings and frames of unknown or earlier owners, ignored. A few after losses are normal.",
            ["kind"],
            registry=self.registry,
        )
        self.tokenizer_failures = Counter(
            "tokenloom:gateway_tokenizer_failures",
            "Failed calls by replica address; each was tried on another replica. One address rising: replace that replica.",
            ["address"],
            registry=self.registry,
        )

        self.quota_local = Gauge(
            "tokenloom:gateway_quota_local",
            "1 while the store is away and this gateway keeps the limits of keys by itself. Look at the store.",
            registry=self.registry,
        )

    def _begin_at_zero(self) -> None:
        for stage in STAGES:
            self.stage.labels(**self._labels, stage=stage)
        for reason in FINISHED:
            self.labelled(self.success, finished_reason=reason)
        for reason in CANCELLED:
            self.labelled(self.cancelled, reason=reason)
        for code in ErrorCode:
            self.labelled(self.rejected, reason=code.spec.label)
        for kind in STRAY:
            self.stray.labels(kind=kind)

    def watch(self, outstanding: Callable[[str], float], window: Callable[[str], float]) -> None:
        """Reads at each scrape, by unit ("sequences", "tokens"), what is outstanding and what may be."""
        for unit in ("sequences", "tokens"):
            self.outstanding.labels(unit).set_function(partial(outstanding, unit))
            self.window.labels(unit).set_function(partial(window, unit))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        family = Histogram(f"tokenloom:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        family = Counter(f"tokenloom:{name}", text, ["model_name", *labels], registry=self.registry)
        return family if labels else family.labels(**self._labels)

    def labelled(self, counter: Counter, **labels: str) -> Counter:
        """The child of a counter that has further labels beside the model's name."""
        return counter.labels(**self._labels, **labels)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Records the time of one stage of one request."""
        self.stage.labels(**self._labels, stage=stage).observe(seconds)
