"""The measurement of the forward pass, on a model of no size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import executor
from services.worker.engine import Executed
from services.worker.slots import StagedRow


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CASES", {"decode 2": (2, 20, 1), "prefill 40": (1, 0, 40)})


@pytest.mark.usefixtures("small")
def test_each_executor_is_measured_in_each_case_beside_busy_processes(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [str(tiny_llama_dir), "--kernels", "cpu", "reference", "--rounds", "2", "--busy", "1", "--threads", "2", "--kinds"]
    cpus = os.sched_getaffinity(0)
    assert executor.main(arguments) == 0
    assert os.sched_getaffinity(0) == cpus
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("decode 2", "prefill 40"))]
    assert [line.split()[2] for line in lines[:4]] == ["cpu", "reference", "cpu", "reference"]
    assert "x 1.00" in lines[0]
    assert "linear" in lines[4]
    assert "attention" in lines[5]


def test_a_cache_too_small_for_the_cases_is_refused(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor, "CASES", {"long": (10**7, 16, 1)})
    with pytest.raises(SystemExit, match="need 20000000 KV blocks"):
        executor.Contender(tiny_llama_dir, "cpu", "none", 1)


def test_a_pass_runs_on_the_core_that_a_workers_runner_keeps_to(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor, "CASES", {"decode 2": (2, 20, 1)})
    cpus, seen = os.sched_getaffinity(0), list[set[int]]()
    contender = executor.Contender(tiny_llama_dir, "cpu", "none", len(cpus))
    execute = contender.engine.execute

    def noted(rows: Sequence[StagedRow]) -> Executed:
        seen.append(os.sched_getaffinity(0))
        return execute(rows)

    monkeypatch.setattr(contender.engine, "execute", noted)
    contender.forward_ms("decode 2")
    assert seen == [{min(cpus)}]
