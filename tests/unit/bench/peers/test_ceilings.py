"""The machine's ceilings, measured over no time."""

from __future__ import annotations

import pytest

from bench import limits
from bench.peers import ceilings
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.native import CpuLibrary


def test_the_best_of_the_tries_is_the_ceiling_and_the_median_beside_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "READ_FLOATS", 1 << 20)
    monkeypatch.setattr(ceilings, "_SIDE", 64)
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings.torch, "set_num_threads", lambda _count: None)  # the other tests' setting
    found = ceilings.measure()
    assert found.read_gb_s >= found.read_median_gb_s > 0
    assert found.gemm_gflop_s > 0
    assert found.variant in ("avx512vnni", "avx512", "avx2", "generic")


def test_each_reader_keeps_to_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "READ_FLOATS", 1 << 20)
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    places: list[set[int]] = []
    monkeypatch.setattr(limits.os, "sched_setaffinity", lambda _thread, cores: places.append(cores))
    ceilings._read(CpuLibrary(ensure_library()), [3, 5])
    assert sorted(places, key=min) == [{3}, {5}]
