"""How long the worker's forward pass takes, by number of rows and kind of operation, in one process and without any service.

    python -m bench.executor MODEL_DIR [--kernels cpu reference] [--quantization none int8 int4] [--threads 2] [--rounds 10] [--busy 1]
                             [--kinds]

Decode steps of 1, 8 and 32 rows behind 128 cached tokens each, a prefill of 512, and steps behind 1,000 tokens and more, where attention
rules. Executors take turns round by round, so that other load on the machine meets all of them; compare the ratios, and mind the load
average that is printed. --busy: beside so many processes that only count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.command import run, whole
from libs.blocks import blocks_for
from libs.sampling import SamplingParams
from services.worker import numerics, openmp
from services.worker.batch import Batch, Opening, Row
from services.worker.config import WorkerConfig
from services.worker.engine import Engine, load
from services.worker.host import usable_cpus
from services.worker.ops.native import Program
from services.worker.slots import SlotTable, StagedRow

CACHED = 128
# Name: rows, tokens in the cache before each, tokens of each row.
CASES = {
    "decode 1": (1, CACHED, 1),
    "decode 8": (8, CACHED, 1),
    "decode 32": (32, CACHED, 1),
    "prefill 512": (1, 0, 512),
    "decode 8 @1000": (8, 1000, 1),
    "decode 1 @4096": (1, 4096, 1),
    "prefill 256 @1024": (1, 1024, 256),
}
MOST_ROWS = 32
CACHE_BYTES = 512 << 20


def staged_rows(engine: Engine, rows: int, cached: int, tokens: int, first_block: int = 0) -> list[StagedRow]:
    """Rows of one step, in blocks of their own from `first_block` on. What they read of the cache is whatever lies there."""
    none, blocks = np.empty(0, np.int32), blocks_for(cached + tokens)
    ids = np.arange(cached + tokens, dtype=np.int32) % engine.facts.vocab_size
    params = SamplingParams(max_tokens=1, temperature=0.0)
    tables = first_block + np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    openings = [Opening(slot, f"row-{slot}", ids, none, cached, tables[slot], params, None, 0) for slot in range(rows)]
    batch = Batch(0, 0, 0, 1, (), tuple(openings), tuple(Row(slot, tokens, True, none) for slot in range(rows)))
    return SlotTable(engine.limits, ()).stage(batch).rows


class Contender:
    """One executor with the model loaded."""

    def __init__(self, model: Path, kernels: str, quantization: str, threads: int) -> None:
        needed = max(rows * blocks_for(cached + tokens) for rows, cached, tokens in CASES.values())
        options = {"model": model, "kernels": kernels, "threads": threads, "max_num_seqs": MOST_ROWS, "kv_cache_memory_bytes": CACHE_BYTES}
        self.name = kernels
        if quantization != "none":
            options["quantization"], self.name = quantization, f"{kernels} {quantization}"
        self.engine = load(WorkerConfig.model_validate(options))
        self._threads = threads if kernels == "reference" else 1
        if self.engine.facts.num_blocks < needed:
            raise SystemExit(f"the cases need {needed} KV blocks; this model has {self.engine.facts.num_blocks} in {CACHE_BYTES >> 20} MiB")
        self._touch(needed)
        self.cases = {name: staged_rows(self.engine, *case) for name, case in CASES.items()}

    def _touch(self, blocks: int) -> None:
        """Writes a token to each block: pages that were never written are all the same one, which no read fetches from memory."""
        for first in range(0, blocks, MOST_ROWS):
            rows = min(MOST_ROWS, blocks - first)
            self.engine.execute(staged_rows(self.engine, rows, 0, 1, first))

    def forward_ms(self, case: str) -> float:
        """Milliseconds of one forward pass, of this thread on the core that a worker's runner would keep to."""
        numerics.use_threads(self._threads)  # torch's team is the process's: each executor sets it as its own worker would
        cpus = os.sched_getaffinity(0)
        self.engine.settle()
        try:
            return self.engine.execute(self.cases[case]).forward_us / 1000
        finally:
            os.sched_setaffinity(0, cpus)  # what the other executors, and processes beside them, go by

    def kinds(self, case: str, steps: int) -> str:
        """Where the time of a step goes, in the thread that leads it; empty for an executor that cannot say."""
        program = self.engine.step
        if not isinstance(program, Program):
            return ""
        program.start_timing()
        before = program.timing()
        for _ in range(steps):
            self.forward_ms(case)
        spent = {kind: (after - before[kind]) / steps / 1e6 for kind, after in program.timing().items()}
        return "   ".join(f"{kind.name.lower()} {milliseconds:.2f}" for kind, milliseconds in spent.items())


def _count() -> None:
    number = 0
    while True:
        number += 1


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that only count, as long as the block runs."""
    running = [multiprocessing.get_context("spawn").Process(target=_count, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def measure(contenders: list[Contender], rounds: int) -> None:
    """Prints a line per case and executor: median, least and most of `rounds` passes, and the ratio to the first executor's median."""
    for case in CASES:
        for contender in contenders:
            contender.forward_ms(case)
        times = [[contender.forward_ms(case) for contender in contenders] for _ in range(rounds)]
        base = statistics.median(turn[0] for turn in times)
        for index, contender in enumerate(contenders):
            mine = [turn[index] for turn in times]
            middle = statistics.median(mine)
            print(f"{case:<18} {contender.name:<14} {middle:8.1f} ms   ({min(mine):.1f} to {max(mine):.1f})   x {middle / base:.2f}")


def main(argv: list[str] | None = None) -> int:
    """Loads, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", nargs="+", choices=["cpu", "reference"], default=["cpu"])
    parser.add_argument("--quantization", nargs="+", choices=["none", "int8", "int4"], default=["none"])
    parser.add_argument("--threads", type=whole(1), default=usable_cpus())
    parser.add_argument("--rounds", type=whole(1), default=10)
    parser.add_argument("--busy", type=whole(0), default=0)
    parser.add_argument("--kinds", action="store_true", help="print the time of each kind of operation too, in milliseconds a step")
    args = parser.parse_args(argv)
    pairs = [(kernels, quantization) for kernels in args.kernels for quantization in args.quantization]
    contenders = [Contender(args.model, *pair, args.threads) for pair in pairs]
    print(f"load average {os.getloadavg()[0]:.2f}; {args.threads} threads; {args.busy} busy processes; spin count {openmp.SPIN_COUNT}")
    with busy(args.busy):
        measure(contenders, args.rounds)
        for contender in contenders:
            for case in CASES if args.kinds else ():
                print(f"{case:<18} {contender.name:<14} {contender.kinds(case, args.rounds)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
