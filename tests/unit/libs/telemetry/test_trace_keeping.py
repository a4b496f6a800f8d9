"""Which traces stay: failed, slow, and a share of the rest; decided when a trace is over and not before."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.clock import ManualClock
from libs.telemetry import trace_keeping
from libs.telemetry.trace_keeping import SETTLE_SECONDS, KeepPolicy, TraceKeeper
from libs.telemetry.trace_store import StoredSpan, TraceReader, TraceStore

SECOND = 1_000_000_000
NOTHING = KeepPolicy(ratio=0.0, slow_seconds=5.0)
_numbers = itertools.count(1)


class Kept:
    """A keeper over a store in a file, and its clock."""

    def __init__(self, path, policy: KeepPolicy) -> None:
        self.clock = ManualClock()
        self.store = TraceStore(path)
        self.keeper = TraceKeeper(self.store, policy, self.clock)
        self.reader = TraceReader(path)

    def settle(self, seconds: float = SETTLE_SECONDS) -> int:
        self.clock.advance(seconds)
        return self.keeper.settle()

    def names(self, trace_id: str) -> list[str]:
        return [span.name for span in self.reader.spans(trace_id)]

    def close(self) -> None:
        self.reader.close()
        self.store.close()


@pytest.fixture
def kept_by(tmp_path):
    opened = []

    def new(policy: KeepPolicy) -> Kept:
        opened.append(Kept(tmp_path / f"{len(opened)}.db", policy))
        return opened[-1]

    yield new
    for kept in opened:
        kept.close()


def span(trace: int, name: str = "request", *, seconds: float = 1.0, parent: str = "", error: str | None = None, route: str = ""):
    attributes = {"http.route": route} if route else {}
    end = round(seconds * SECOND)
    return StoredSpan(f"{trace:032x}", f"{next(_numbers):016x}", parent, name, "tokenloom-gateway", 0, end, attributes, error=error)


@pytest.mark.parametrize(
    ("spans", "stays"),
    [
        ([span(1)], False),
        ([span(1, seconds=4.9)], False),
        ([span(1, seconds=5.0)], True),
        ([span(1, error="broken")], True),
        ([span(1, "decode", parent="aa", error="broken"), span(1)], True),
        ([span(1, parent="c0ffee", route="/v1/completions")], False),
        ([span(1, parent="c0ffee", route="/v1/completions", seconds=6)], True),
        ([span(1, "decode", parent="aa", seconds=9)], True),
    ],
    ids=["fast", "nearly slow", "slow", "failed", "failed within", "a caller's", "a caller's slow", "no root"],
)
def test_failed_and_slow_traces_and_those_without_a_root_stay(kept_by, spans, stays):
    kept = kept_by(NOTHING)
    kept.keeper.add(spans)
    assert kept.settle() == int(not stays)
    assert bool(kept.names(f"{1:032x}")) == stays


def test_a_trace_can_be_read_until_it_is_decided_and_waits_for_its_last_spans(kept_by):
    kept, trace = kept_by(NOTHING), f"{1:032x}"
    kept.keeper.add([span(1, "tokenize", parent="aa")])
    assert kept.settle(3600) == 0, "the root is still to come, however long the request takes"
    kept.keeper.add([span(1)])
    assert kept.settle(SETTLE_SECONDS - 0.5) == 0
    kept.keeper.add([span(1, "decode", parent="aa", error="late, but in time")])
    assert kept.settle(SETTLE_SECONDS - 0.5) == 0
    assert kept.settle() == 0
    assert sorted(kept.names(trace)) == ["decode", "request", "tokenize"]


def test_late_spans_of_a_trace_that_was_decided_against_are_not_stored(kept_by):
    kept = kept_by(NOTHING)
    kept.keeper.add([span(1)])
    assert kept.settle() == 1
    kept.keeper.add([span(1, "worker.decode", parent="aa", error="x"), span(2)])
    assert kept.names(f"{1:032x}") == []
    assert kept.names(f"{2:032x}") == ["request"]


def test_a_trace_that_is_waited_for_does_not_hold_up_the_others(kept_by):
    kept = kept_by(NOTHING)
    kept.keeper.add([span(1, "tokenize", parent="aa")])
    kept.keeper.add([span(2)])
    assert kept.settle() == 1


def test_memory_is_bounded_and_what_is_forgotten_stays(kept_by, monkeypatch):
    monkeypatch.setattr(trace_keeping, "MAX_UNDECIDED", 3)
    monkeypatch.setattr(trace_keeping, "MAX_REMEMBERED", 2)
    kept = kept_by(NOTHING)
    kept.keeper.add([span(trace) for trace in range(1, 6)])
    assert kept.settle() == 3
    assert [bool(kept.names(f"{trace:032x}")) for trace in range(1, 6)] == [True, True, False, False, False]
    assert (len(kept.keeper._undecided), len(kept.keeper._refused)) == (0, 2)


def test_about_the_ratio_is_kept_whatever_a_sampler_chose_before(kept_by):
    policy = KeepPolicy(ratio=0.25)
    ids = [f"{(number << 64) + number % 100:032x}" for number in range(4000)]  # their last bits are small: a ratio sampler keeps such
    kept = sum(policy.keeps(trace_id, 1.0, failed=False) for trace_id in ids)
    assert 800 < kept < 1200


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_ratio_keeps_whatever_a_lower_one_does(trace, one, other):
    low, high = sorted((one, other))
    trace_id = f"{trace:032x}"
    assert KeepPolicy(low).keeps(trace_id, 0, failed=False) <= KeepPolicy(high).keeps(trace_id, 0, failed=False)
    assert KeepPolicy(1.0).keeps(trace_id, 0, failed=False)
    assert not KeepPolicy(0.0).keeps(trace_id, 0, failed=False)
