"""The machine's ceilings, measured over no time."""

from __future__ import annotations

import pytest

from bench.peers import ceilings


def test_the_best_of_the_tries_is_the_ceiling_and_the_median_beside_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "_READ_BYTES", 1 << 22)
    monkeypatch.setattr(ceilings, "_SIDE", 64)
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings.torch, "set_num_threads", lambda _count: None)  # the other tests' setting
    found = ceilings.measure()
    assert found.read_gb_s >= found.read_median_gb_s > 0
    assert found.gemm_gflop_s > 0
