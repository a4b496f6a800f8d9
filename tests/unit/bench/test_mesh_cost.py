"""What both sides of the comparison are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mesh_cost import lone_config, of_both


def test_flags_of_the_mesh_reach_the_runner_alone():
    flags = ["--quantization", "int8", "--no-pin-threads", "--threads", "1", "--max-num-seqs", "7", "--max-queue", "9"]
    config = lone_config(Path("m"), flags)
    assert (config.model, config.quantization, config.pin_threads, config.threads, config.max_num_seqs) == (Path("m"), "int8", False, 1, 7)
    assert lone_config(Path("m"), []).kv_cache_memory_bytes == int(of_both(Path("m"), [])[2])
    assert lone_config(Path("m"), ["--kv-cache-memory-bytes", "64M"]).kv_cache_memory_bytes == 64 << 20


def test_flags_that_a_mesh_refuses_are_refused_before_it_starts():
    with pytest.raises(SystemExit):
        lone_config(Path("m"), ["--no-such-flag"])
