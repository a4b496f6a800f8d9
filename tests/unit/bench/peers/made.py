"""Results of a comparison as they lie in its folder, made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.peers.plan import Load, folder
from bench.peers.servers import Server

SMALL = (
    Server("tokenloom", "Tokenloom", ("serve", "{float32}"), loads=("a", "b", "b+busy"), exact=True, kv_bytes=1 << 30),
    Server("vllm", "vLLM", ("vllm", "{float32}"), environment="vllm", loads=("a", "b", "b+busy")),
    Server("llamacpp", "llama.cpp", ("llama", "{f32}"), environment="llamacpp", loads=("a",), rounds=1),
)


def run(rate: float, *, others: float = 0.0, failed: int = 0, tpot: float = 10.0, steal: float = 0.0) -> dict[str, Any]:
    """One load's result with so many output tokens a second, CPU of others in cores, and failed requests."""
    times = {"count": 4, "mean": tpot, "p50": tpot, "p95": tpot, "p99": 2 * tpot, "max": tpot}
    statistics = {"completed": 4, "failed": failed, "failures": {}, "output_tokens_per_s": rate, "total_tokens_per_s": 2 * rate}
    statistics |= {"without_usage": 0, "short_outputs": 0}
    statistics |= {"ttft_ms": times, "tpot_ms": times, "itl_ms": times}
    return {
        "statistics": statistics,
        "cpu": {"others_cores": others, "steal_s": steal, "wall_s": 10.0},
        "machine": {"cores": 2, "client_commit": "abc"},
        "seed": 1,
        "ceilings": {"before": {"read_median_gb_s": 30.0}, "after": {"read_median_gb_s": 50.0}},
    }


def put(out: Path, server: str, load: str, number: int, content: dict[str, Any]) -> None:
    """Writes a load's result where a comparison would."""
    file = Load(number, server, load).file(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def put_facts(out: Path, server: str, number: int, **facts: Any) -> None:
    """Writes what is known of a server in a round, as a server that started and passed its gate."""
    command = next((list(one.command) for one in SMALL if one.name == server), [])
    known = {
        "command": command,
        "variables": {},
        "version": {"program": "1"},
        "ready_s": 3.0,
        "first_answer_s": 3.1,
        "gate": {"equal": 20, "prompts": 20, "first": {}, "texts": 0},
    }
    known |= {"memory_ready": {"pss_mb": 900.0, "rss_mb": 1200.0}, "memory_after": {"pss_mb": 1900.0, "rss_mb": 2200.0}}
    place = folder(out, number, server)
    place.mkdir(parents=True, exist_ok=True)
    (place / "server.json").write_text(json.dumps(known | facts))
    (out / f"round-{number}" / "machine.json").write_text(json.dumps({"read_gb_s": 50.0, "gemm_gflop_s": 200.0, "load_average": 0.1}))
