"""How long all products of a model's step take, by number of rows, beside the machine's limits and other libraries' products.

    python -m bench.products [--rows 1 8 32 512] [--threads 2] [--rounds 5] [--others torch mkl onednn]

The shapes are those of SmolLM2-135M with random weights: 30 layers and a head over every row (so that a prefill's head costs more here than
in a step). Contenders take turns round by round. `limit` is the time that the slower of two things takes by itself: the multiplications at
the rate of a loop on registers alone, the weights at the rate of a loop that only reads, both measured in this run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.command import run, whole
from bench.limits import Limits, measure_limits
from services.worker import openmp
from services.worker.host import usable_cpus
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.base import StepInputs, Value
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team

ROWS = (1, 4, 8, 16, 17, 32, 64, 158, 256, 512)
LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 30, 576, 1536, 192, 49_152
# Outputs and inputs of a layer's products: qkv, o, gate and up, down.
SHAPES = ((HIDDEN + 2 * KEYS, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
PARAMETERS = LAYERS * sum(out * into for out, into in SHAPES) + VOCABULARY * HIDDEN

# All products of a step of x [rows, HIDDEN].
Products = Callable[[torch.Tensor], object]
# A weight as somebody's product of so many rows: x [rows, in] to [rows, out].
Prepare = Callable[[torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]]


def weights() -> list[list[torch.Tensor]]:
    """Of each layer, then the head alone."""
    random = torch.Generator().manual_seed(0)
    shapes = [SHAPES] * LAYERS + [((VOCABULARY, HIDDEN),)]
    return [[torch.randn(*shape, generator=random) / shape[1] ** 0.5 for shape in layer] for layer in shapes]


def our_products(ops: CpuOps, model: list[list[torch.Tensor]]) -> Products:
    """The products as a program without what usually lies between them, the activation aside."""
    table = torch.randn(max(ROWS), HIDDEN, generator=torch.Generator().manual_seed(1))
    layers = [[ops.pack_linear(weight, None, gated=weight.shape[0] == 2 * INNER) for weight in layer] for layer in model]

    def forward(inputs: StepInputs, cache: object) -> Value:
        x = ops.embedding(inputs.token_ids, table)
        for qkv, output, gate_up, down in layers[:-1]:
            ops.linear(x, qkv)
            x = ops.linear(ops.linear(ops.linear(x, output), gate_up), down, residual=x)
        return ops.linear(x, layers[-1][0])

    step = ops.bind(forward, [], max(ROWS))
    return lambda x: step(_one_row_each(x.shape[0]))


def _one_row_each(tokens: int) -> StepInputs:
    indices = torch.arange(tokens)
    nothing = torch.zeros(tokens, dtype=torch.int64)
    starts, lengths = torch.arange(tokens + 1, dtype=torch.int32), torch.ones(tokens, dtype=torch.int32)
    return StepInputs(indices, nothing, nothing, starts, lengths, torch.zeros(tokens, 1, dtype=torch.int32), indices)


def _torch(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight)


def _mkl(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


def _onednn(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


OTHERS: dict[str, Prepare] = {"torch": _torch, "mkl": _mkl, "onednn": _onednn}


def their_products(prepare: Prepare, model: list[list[torch.Tensor]], rows: int) -> Products:
    """The same products one after the other, each over an input of its width."""
    layers = [[prepare(weight, rows) for weight in layer] for layer in model]
    inner = torch.randn(rows, INNER)

    def run(x: torch.Tensor) -> None:
        for layer in layers:
            for index, product in enumerate(layer):
                product(inner if index == 3 else x)

    return run


def limit_ms(limits: Limits, rows: int) -> float:
    """The least time that so many rows can take."""
    return max(2e-6 * PARAMETERS * rows / limits.gflops, 4e-6 * PARAMETERS / limits.gigabytes)


def measure(contenders: dict[str, Products], limits: Limits, rows: int, rounds: int) -> None:
    """Prints a line for each contender: median and least time, both rates, and the median over the limit."""
    x = torch.randn(rows, HIDDEN)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, product in contenders.items():
            began = time.perf_counter()
            product(x)
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - began) * 1000)
    least = limit_ms(limits, rows)
    for name, mine in times.items():
        middle = statistics.median(mine)
        rates = f"{2e-6 * PARAMETERS * rows / middle:7.1f} GFLOP/s  {4e-6 * PARAMETERS / middle:6.1f} GB/s"
        print(f"{rows:4d} rows  {name:<7} {middle:8.2f} ms  ({min(mine):.2f} at least)  {rates}  x {middle / least:.2f} of the limit")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the limits, then the products, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(1, max(ROWS)), nargs="+", default=list(ROWS), metavar="N")
    parser.add_argument("--threads", type=whole(1), default=usable_cpus())
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--others", nargs="*", choices=list(OTHERS), default=[])
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    library = CpuLibrary(ensure_library())
    model = weights()
    ours = our_products(CpuOps(library, Team(library, args.threads)), model)
    print(f"load average {os.getloadavg()[0]:.2f}; {args.threads} threads; {library.variant}; spin count {openmp.SPIN_COUNT}")
    for rows in args.rows:
        limits = measure_limits(library, args.threads)
        print(f"limits: {limits.gflops:.1f} GFLOP/s, {limits.gigabytes:.1f} GB/s read, so {limit_ms(limits, rows):.2f} ms")
        with torch.inference_mode():
            theirs = {name: their_products(OTHERS[name], model, rows) for name in args.others}
            measure({"ours": ours} | theirs, limits, rows, args.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
