"""The measurement of what the split into services costs, from its command line to its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_llama import make_tiny_llama
from tools.ports import free_port

pytestmark = pytest.mark.e2e
SECONDS = 110


def test_a_served_load_runs_again_alone_step_by_step_and_every_service_is_accounted_for(tmp_path: Path):
    model = make_tiny_llama(tmp_path / "tiny", max_position_embeddings=2048)
    result, port = tmp_path / "cost.json", str(free_port())
    command = [sys.executable, "-m", "bench.mesh_cost", str(model), "--workloads", "a", "--num-prompts", "2", "--port", port]
    environment = {**os.environ, "TOKENLOOM_RUN_DIR": f"/tmp/tokenloom-test-{os.getpid()}-{port}"}
    done = subprocess.run([*command, "--json", str(result)], env=environment, capture_output=True, timeout=SECONDS, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [turn] = json.loads(result.read_text())
    assert turn["served"]["steps"] == turn["alone"]["steps"] > 128
    assert turn["served"]["rows"] == turn["alone"]["rows"] == 1
    assert min(turn["served"]["step_ms"], turn["alone"]["step_ms"], turn["step_ratio"], *turn["hops_ms"]) > 0
    assert turn["ttft_added_ms"] < turn["ttft_ms"]
    assert {"services.worker", "services.scheduler", "services.gateway"} <= turn["cpu_s_per_1000_tokens"].keys()
    assert "step ratio" in done.stdout
