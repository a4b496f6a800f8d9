"""What is computed from records: against numpy, against hand-made runs, and for properties that hold whatever the samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import Distribution, percentile, summarize
from bench.stream import RequestRecord

SECONDS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
SAMPLES = st.lists(SECONDS, min_size=1, max_size=50)


def finished(due, *chunks, prompt=10, output=None, cached=0):
    output = len(chunks) if output is None else output
    return RequestRecord(due, due, chunks[-1], list(chunks), prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)


def failed(due, ended, kind):
    return RequestRecord(due, due, ended, failure=kind)


@given(SAMPLES, st.floats(0, 1))
def test_a_percentile_is_numpys(samples, q):
    assert percentile(sorted(samples), q) == pytest.approx(float(np.quantile(samples, q)), rel=1e-9, abs=1e-9)


@given(SAMPLES)
def test_a_distribution_is_ordered_in_milliseconds_and_does_not_depend_on_the_order_of_samples(samples):
    found = Distribution.of(samples)
    assert found == Distribution.of(samples[::-1])
    assert min(samples) * 1e3 <= found.p50 <= found.p95 <= found.p99 <= found.max == max(samples) * 1e3
    assert found.count == len(samples)


def test_a_distribution_without_samples_has_no_numbers():
    assert Distribution.of([]) == Distribution(0, None, None, None, None, None)
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=40), st.floats(0, 100))
def test_ttft_and_the_gaps_add_up_to_the_last_token_and_tpot_is_their_mean_at_one_token_a_chunk(steps, due):
    times = [due + sum(steps[: i + 1]) for i in range(len(steps))]
    record = finished(due, *times)
    assert record.ttft + sum(record.gaps) == pytest.approx(times[-1] - due)
    assert record.tpot == pytest.approx(sum(record.gaps) / len(record.gaps))


def test_tpot_counts_tokens_not_chunks_and_needs_two_of_both():
    assert finished(0.0, 1.0, 2.0, output=5).tpot == pytest.approx(0.25)
    assert finished(0.0, 1.0, output=5).tpot is None
    assert finished(0.0, 1.0, 2.0, output=1).tpot is None
    assert RequestRecord(0.0, chunk_times=[1.0, 2.0]).tpot is None


def test_a_run_is_counted_over_its_whole_time_with_failures_by_kind_and_without_their_tokens():
    records = [finished(10.0, 11.0, 12.0, prompt=30, cached=16), finished(11.0, 12.0, 14.0, prompt=30), failed(10.5, 15.0, "timeout")]
    records += [failed(12.0, 12.0, "connect"), failed(12.0, 12.1, "connect")]
    found = summarize(records, output_len=2)
    assert (found.completed, found.failed, found.failures) == (2, 3, {"connect": 2, "timeout": 1})
    assert found.duration_s == 5.0
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (60, 4, 16)
    assert found.output_tokens_per_s == pytest.approx(4 / 5)
    assert found.total_tokens_per_s == pytest.approx(64 / 5)
    assert found.requests_per_s == pytest.approx(2 / 5)
    assert (found.ttft_ms.count, found.ttft_ms.p50) == (2, 1000.0)
    assert found.itl_ms.max == 2000.0


def test_answers_without_usage_and_short_ones_are_told_apart():
    silent = RequestRecord(0.0, 0.0, 2.0, [1.0, 2.0])
    found = summarize([silent, finished(0.0, 1.0, 2.0, output=2), finished(0.0, 1.0, 2.0, output=4)], output_len=4)
    assert (found.without_usage, found.short_outputs, found.completed) == (1, 1, 3)
    assert found.output_tokens == 6
    assert found.tokens_per_chunk == pytest.approx(1.5)


def test_a_run_of_failures_only_has_no_times_and_no_tokens():
    found = summarize([failed(0.0, 1.0, "http_503")], output_len=4)
    assert (found.completed, found.output_tokens_per_s, found.tokens_per_chunk, found.ttft_ms.p50) == (0, 0.0, None, None)
    with pytest.raises(ValueError, match="no requests"):
        summarize([], output_len=4)


@given(st.lists(st.one_of(st.none(), st.sampled_from(["connect", "timeout", "http_429"])), min_size=1, max_size=30))
def test_every_request_is_completed_or_failed_by_exactly_one_kind(kinds):
    records = [finished(0.0, 1.0, 2.0) if kind is None else failed(0.0, 1.0, kind) for kind in kinds]
    found = summarize(records, output_len=2)
    assert found.completed + sum(found.failures.values()) == len(kinds)
    assert found.failed == sum(found.failures.values())
