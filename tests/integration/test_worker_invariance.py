"""PROTOCOL.md rule 15 on the real model; tests/property/test_batch_invariance.py has the many cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.invariance import BUDGET, Drive, assert_same_bits
from tests.unit.worker.helpers import load_engine

pytestmark = pytest.mark.model


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_logits_of_the_real_model_have_the_bits_that_they_have_alone(model_dir: Path, options: dict[str, str]):
    engine = load_engine(model_dir, threads=2, kv_cache_memory_bytes=256 << 20, max_num_seqs=64, max_num_batched_tokens=BUDGET, **options)
    drive = Drive(length=330, others=[3, 40, 17, 260, 1, 90], shared=7, preempted=1, most=150, threads=2, seed=3)
    assert_same_bits({1: engine, 2: engine}, drive)
