"""What the split into services costs: a served load, and the same batches run again by the worker's runner alone.

    python -m bench.mesh_cost MODEL_DIR [--workloads a b c] [--rounds 2] [--json FILE] [-- flags of tokenloom serve]

Starts `tokenloom serve MODEL_DIR --record-steps ...`, loads it with workloads of bench.load, and after each runs the recorded batches
in this process, with the same flags, while the mesh stands idle; rounds take turns, so that other load on the machine meets both.
Prints by workload

    served / alone   milliseconds a step: forward, prepare, sample, rest of the step, idle before it while requests were there
    step ratio       a served step's period over the same step's alone, median: what gateway, scheduler, tokenizer and RPC add
    TTFT added       time to first token at the client less what the worker alone takes for the steps meanwhile, median, in ms; and, of
                     requests that found an idle worker, the way to their first step and back
    CPU              seconds of each process for 1,000 output tokens

Other load on the machine moves all of it: mind the load average that is printed, and compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.command import run, whole, writable
from bench.load import drive, parse
from bench.replay import LoneRunner
from bench.stats import summarize
from bench.timeline import Line, added_to_first_token_ms, hops_ms, moments, period_ratio
from cli.flags import ServeConfig, service_config
from libs.config import parse as parse_settings
from libs.errors import TokenloomError
from services.worker.config import WorkerConfig
from services.worker.step_log import read_steps

_KV_BYTES = 1 << 30
_READY_SECONDS = 120
# After a mesh is ready, encoders and compilers of constraints go on loading: steps meanwhile took a fifth longer.
_SETTLE_SECONDS = 3


@contextmanager
def served(model: Path, port: int, record: Path, flags: Sequence[str]) -> Iterator[psutil.Process]:
    """The mesh, ready; ended when the block ends. Raises SystemExit when it does not come up."""
    command = [str(Path(sys.executable).with_name("tokenloom")), "serve", "--port", str(port), "--record-steps", str(record)]
    log = record.with_suffix(".log").open("wb")
    process = subprocess.Popen([*command, *of_both(model, flags)], stdout=log, stderr=log)
    try:
        _wait_ready(process, port, Path(log.name))
        time.sleep(_SETTLE_SECONDS)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
        log.close()


def of_both(model: Path, flags: Sequence[str]) -> list[str]:
    """What the mesh and the runner alone are told."""
    return [str(model), "--kv-cache-memory-bytes", str(_KV_BYTES), *flags]


def lone_config(model: Path, flags: Sequence[str]) -> WorkerConfig:
    """What a mesh of these flags would tell its worker. Raises SystemExit for flags that it would refuse."""
    options = parse_settings(ServeConfig, of_both(model, flags), prog="bench.mesh_cost")
    try:
        return service_config(WorkerConfig, options, model=model)
    except TokenloomError as error:
        raise SystemExit(error.message) from error


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"the mesh is not ready:\n{log.read_text(errors='replace')[-2000:]}")


def cpu_by_service(root: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of the mesh's processes, by the module that each runs."""
    spent = dict[str, float]()
    for process in (root, *root.children(recursive=True)):
        words = process.cmdline()
        name = words[words.index("-m") + 1] if "-m" in words else process.name()
        times = process.cpu_times()
        spent[name] = spent.get(name, 0.0) + times.user + times.system
    return spent


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One workload, served and alone."""

    workload: str
    served: Line
    alone: Line
    step_ratio: float
    ttft_added_ms: float | None
    hops_ms: tuple[float, float] | None
    ttft_ms: float | None
    output_tokens_per_s: float
    cpu_s_per_1000_tokens: dict[str, float]


def turn(root: psutil.Process, workload: str, words: Sequence[str], record: Path, lone: LoneRunner) -> Turn:
    """Loads the mesh with a workload (`words`: the flags of bench.load beside it), then runs its batches alone.

    Raises SystemExit when a request failed.
    """
    offset = record.stat().st_size if record.exists() else 0
    options = parse(["--workload", workload, "--server-pid", str(root.pid), *words])
    before = cpu_by_service(root)
    records, _ = asyncio.run(drive(options))
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_by_service(root).items()}
    facts = summarize(records, options.workload.output_len)
    if facts.failed:
        raise SystemExit(f"{facts.failed} requests of workload {workload} failed: {facts.failures}")
    steps = list(read_steps(record, offset))
    there, here = moments(steps), moments(lone.replay(steps))
    begins = min(record.due for record in records) * 1e6
    loaded = [index for index, step in enumerate(there) if step.began_us >= begins]  # without the warm-up
    there, here = [there[index] for index in loaded], [here[index] for index in loaded]
    return Turn(
        workload, Line.of(there), Line.of(here), round(period_ratio(there, here), 3),
        added_to_first_token_ms(records, there, here), hops_ms(records, there),
        facts.ttft_ms.p50, round(facts.output_tokens_per_s, 1),
        {name: round(seconds / facts.output_tokens * 1000, 3) for name, seconds in sorted(spent.items()) if seconds > 0.005},
    )  # fmt: skip


def show(one: Turn) -> None:
    """Prints one turn."""
    print(f"workload {one.workload}: {one.served.steps} steps of {one.served.rows} rows; load average {os.getloadavg()[0]:.2f}")
    for name, line in (("served", one.served), ("alone", one.alone)):
        print(
            f"  {name:<7} step {line.step_ms:7.2f}   forward {line.forward_ms:7.2f}   prepare {line.prepare_ms:5.2f}"
            f"   sample {line.sample_ms:5.2f}   rest {line.rest_ms:5.2f}   idle {line.idle_ms:5.2f} ({line.idle_share:.1%})"
        )
    hops = f" ({one.hops_ms[0]} to the worker, {one.hops_ms[1]} back)" if one.hops_ms is not None else ""
    ttft = f"{one.ttft_ms:.1f}" if one.ttft_ms is not None else "none"
    print(f"  step ratio {one.step_ratio:.3f}   TTFT p50 {ttft}, added {one.ttft_added_ms}{hops}   output {one.output_tokens_per_s} tok/s")
    print("  CPU s / 1,000 tokens: " + "   ".join(f"{name} {seconds}" for name, seconds in one.cpu_s_per_1000_tokens.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Serves, loads, replays, prints."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=["a", "b", "c", "d"], default=["a", "b", "c"])
    parser.add_argument("--rounds", type=whole(1), default=1)
    parser.add_argument("--port", type=int, default=8730)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--num-prompts", type=whole(0), default=0, help="requests of each workload (default: the workload's own)")
    parser.add_argument("--json", type=writable)
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the mesh ends too
    lone, turns = LoneRunner(lone_config(args.model, flags)), list[Turn]()
    with tempfile.TemporaryDirectory() as folder, served(args.model, args.port, Path(folder) / "steps", flags) as root:
        for index in range(args.rounds):
            for offset, workload in enumerate(args.workloads):
                seed = args.seed + 10 * index + offset  # prompts of their own, or the prefix cache answers
                load = ["--url", f"http://127.0.0.1:{args.port}", "--model", args.model.name, "--seed", str(seed)]
                load += ["--num-prompts", str(args.num_prompts)] if args.num_prompts else []
                turns.append(turn(root, workload, load, Path(folder) / "steps", lone))
                show(turns[-1])
    lone.close()
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in turns], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
