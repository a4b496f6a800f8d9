"""The tokenizer service's metrics; each help text says what to do about the number."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from libs.errors import ErrorCode
from libs.telemetry.metrics import STEP_BUCKETS, new_registry


class TokenizerMetrics:
    """One instance per service instance, on its own registry."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.requests = Counter(
            "tokenloom:tokenizer_requests",
            "Calls by kind (text, chat, token_ids, decode) and outcome (ok, or the error's label). A rising tokenizer_busy share asks for "
            "more --tokenizer-pool-size or replicas; template_error points at clients or the model's chat template.",
            ["kind", "outcome"],
            registry=registry,
        )
        self.queue = Histogram(
            "tokenloom:tokenizer_queue_seconds",
            "Time that prompts wait for an encoder process. More than a few milliseconds: raise --tokenizer-pool-size or add replicas.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.encode = Histogram(
            "tokenloom:tokenizer_encode_seconds",
            "Time in an encoder process (rendering, encoding, hashing). A long tail means very long prompts or a slow chat template.",
            ["kind"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.tokens = Counter(
            "tokenloom:tokenizer_tokens",
            "Prompt tokens produced. Compare with the scheduler's prompt_tokens: a lasting gap is work that was refused after encoding.",
            registry=registry,
        )
        self.busy = Gauge(
            "tokenloom:tokenizer_pool_busy",
            "Encoder processes at work. Constantly equal to tokenizer_pool_size: prompts wait; see tokenizer_queue_seconds.",
            registry=registry,
        )
        self.pool_size = Gauge(
            "tokenloom:tokenizer_pool_size",
            "Encoder processes that are loaded and alive. Below --tokenizer-pool-size for long: they die or do not start; see the log.",
            registry=registry,
        )
        self.restarts = Counter(
            "tokenloom:tokenizer_process_restarts",
            "Encoder processes replaced, by reason: timeout (a prompt took longer than --tokenizer-timeout), abandoned (its caller left), "
            "died (it crashed or ran out of --tokenizer-memory-bytes). Anything but 0 deserves a look at the prompts in the log.",
            ["reason"],
            registry=registry,
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """All series exist from the start: a rate over one that is born with its first event misses that event."""
        for kind in ("text", "chat", "token_ids"):
            for outcome in ("ok", ErrorCode.TOKENIZER_BUSY.spec.label, ErrorCode.CANCELLED.spec.label):
                self.requests.labels(kind=kind, outcome=outcome)
        for kind in ("text", "chat"):
            self.encode.labels(kind=kind)
        for reason in ("timeout", "abandoned", "died"):
            self.restarts.labels(reason=reason)
