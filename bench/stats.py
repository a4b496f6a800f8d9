"""What is computed from the records of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stream import RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds: mean and percentiles of `count` samples. All are None without a sample."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        """From samples in seconds, in any order."""
        if not seconds:
            return cls(0, None, None, None, None, None)
        ordered = sorted(sample * 1e3 for sample in seconds)
        p50, p95, p99 = (percentile(ordered, q) for q in (0.5, 0.95, 0.99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of ascending samples, interpolated linearly between neighbours (numpy's default).

    Raises ValueError without samples.
    """
    if not ordered:
        raise ValueError("no samples")
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Statistics:
    """One run. Tokens, rates and times are of the requests that succeeded; rates are per second of `duration_s`.

    `duration_s` runs from the first request's due time to the last one's end, failed ones included. `without_usage` requests have no
    token counts and are missing from the rates. `short_outputs` ended below the output length asked for. `lateness_ms` is how long after
    its due time a request was sent: large where the client could not keep up, which then shows in TTFT too.
    """

    completed: int
    failed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    without_usage: int
    short_outputs: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    tokens_per_chunk: float | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    lateness_ms: Distribution


def summarize(records: Sequence[RequestRecord], output_len: int) -> Statistics:
    """Statistics of a run whose requests each asked for `output_len` tokens. Raises ValueError without records."""
    if not records:
        raise ValueError("no requests")
    good = [record for record in records if record.failure is None]
    counted = [record for record in good if record.output_tokens is not None and record.prompt_tokens is not None]
    failures = Counter(record.failure for record in records if record.failure is not None)
    duration = max(record.ended for record in records) - min(record.due for record in records)
    prompt = sum(record.prompt_tokens or 0 for record in counted)
    output = sum(record.output_tokens or 0 for record in counted)
    chunks = sum(len(record.chunk_times) for record in counted)
    return Statistics(
        completed=len(good),
        failed=len(records) - len(good),
        failures=dict(sorted(failures.items())),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in counted),
        output_tokens=output,
        without_usage=len(good) - len(counted),
        short_outputs=sum((record.output_tokens or 0) < output_len for record in counted),
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(prompt + output) / duration,
        requests_per_s=len(good) / duration,
        tokens_per_chunk=output / chunks if chunks else None,
        ttft_ms=Distribution.of([record.ttft for record in good if record.ttft is not None]),
        tpot_ms=Distribution.of([record.tpot for record in good if record.tpot is not None]),
        itl_ms=Distribution.of([gap for record in good for gap in record.gaps]),
        e2e_ms=Distribution.of([record.ended - record.due for record in good]),
        lateness_ms=Distribution.of([record.sent - record.due for record in records]),
    )
