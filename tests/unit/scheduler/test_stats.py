"""The periodic line of statistics: there when something happened, silent otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler import stats
from services.scheduler.stats import StatsLine
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import step, submit


class Recorder:
    """Stands for the logger."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(stats, "log", recorder)
    return recorder


def test_before_a_worker_has_attached_there_is_nothing_to_say(log: Recorder):
    StatsLine(1e-9).tick(None)
    assert log.lines == []


def test_before_the_interval_is_over_nothing_is_said(log: Recorder):
    state = make_state()
    submit(state, [1])
    StatsLine(1000.0).tick(state)
    assert log.lines == []


def test_the_line_has_the_numbers_of_the_core(log: Recorder):
    state = make_state()
    group = add_group(state, slots=1)
    submit(state, [1] * 20)
    submit(state, [2])
    step(state, group)
    StatsLine(1e-9).tick(state)
    line = log.lines[0]
    assert (line["running"], line["waiting"], line["kv_usage"]) == (1, 1, 0.25)
    assert (line["finished"], line["preemptions"], line["prefix_hit_rate"]) == (0, 0, 0.0)
    assert line["steps_per_s"] > 0


def test_steps_are_counted_since_the_last_line(log: Recorder):
    state = make_state()
    group = add_group(state)
    submit(state, [1], max_tokens=20)
    line = StatsLine(0.5)
    for steps in (3, 2):
        for _ in range(steps):
            step(state, group)
        line._due = 0.0
        line.tick(state)
    assert [entry["steps_per_s"] for entry in log.lines] == [6.0, 4.0]


def test_an_idle_scheduler_is_silent_after_its_last_line(log: Recorder):
    state = make_state()
    group = add_group(state)
    submit(state, [1], max_tokens=1)
    step(state, group)
    line = StatsLine(1e-9)
    line.tick(state)
    line.tick(state)
    assert len(log.lines) == 1


def test_requests_that_wait_keep_it_talking(log: Recorder):
    state = make_state()
    submit(state, [1])
    line = StatsLine(1e-9)
    line.tick(state)
    line.tick(state)
    assert len(log.lines) == 2
    assert log.lines[0]["kv_usage"] == 0.0
