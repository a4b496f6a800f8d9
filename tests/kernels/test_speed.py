"""A step takes no longer than the machine's arithmetic and memory ask for: its time over that of loops measured in the same process.

One thread's CPU time, which does not run while others have the core; each step between two measures of its loop, and the least of several
ratios, since neighbours on the same memory and caches make things slower, never faster. The loop reads as many bytes as the step's weights
have and multiplies as many matrices, one after the other, by torch: it chooses its instructions by itself, so that a build of ours that
lacks this CPU's fails. Threads are held against one by the clock, since what they lose they lose waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from services.worker.host import usable_cpus
from services.worker.ops.base import HeadShape, StepInputs
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from services.worker.ops.weight_memory import WeightMemory
from tests.kernels.support import Running, Sequences, Shapes, sequences
from tests.kernels.test_int4 import Quantizing
from tests.support.quantized import per_channel

# SmolLM2-135M's shapes with fewer layers and tokens: 95 MB of weights as floats, 66 as integers, more than most caches hold.
SHAPES = Shapes(HeadShape(9, 3, 64), hidden=576, inner=1536, vocabulary=4096, layers=6)
OF_INTEGERS = replace(SHAPES, layers=18)
MOST_ROWS, PREFILL, CACHED, ROUNDS = 32, 256, 64, 6
# Multiplications that torch does in one product, of SHAPES.hidden x COLUMNS.
COLUMNS = 1536
# What a measure adds up to at least: some systems' clocks of a thread tick every 10 ms.
LEAST_SECONDS = 0.05
# Intel's CPUs with two units for 512 bits, for which torch's library of products is made: its loop may take half of what it takes here.
INTEL = "GenuineIntel"
MOST_PREFILL_ON_INTEL = 2.2
# Two threads' time over one's: half, and what they wait for each other. The test fails when they share a core, or when one does it all.
MOST_OF_TWO_THREADS, SECONDS_OF_THREADS = 0.8, 4.0
# Two threads that do a product each take half of one's time for both, and more only where neighbours have the second core.
MOST_OF_FREE_CORES = 0.65


@dataclass(frozen=True)
class Case:
    """A step of so many rows with so many tokens each. `most`: from which share of its loop's time on the test fails, by the
    instructions that the library chose; twice what is known on an AMD EPYC of Zen 4 is beyond it there.
    """

    rows: int
    tokens: int
    most: Mapping[str, float]
    kind: str = "floats"

    @property
    def floats(self) -> bool:
        return self.kind == "floats"

    @property
    def shapes(self) -> Shapes:
        return SHAPES if self.floats else OF_INTEGERS


def bounds(vnni: float, avx512: float, avx2: float) -> Mapping[str, float]:
    """`generic` has the bounds of the best: no CPU on which torch has AVX2 may be left with it."""
    return {"avx512vnni": vnni, "avx512": avx512, "avx2": avx2, "generic": vnni}


CASES = {
    "decode 1": Case(1, 1, bounds(1.35, 1.35, 1.35)),
    "decode 8": Case(8, 1, bounds(1.2, 1.2, 1.5)),
    "decode 32": Case(32, 1, bounds(1.4, 1.4, 1.4)),
    "prefill": Case(1, PREFILL, bounds(1.6, 1.6, 1.6)),
    "decode 1, int8": Case(1, 1, bounds(2.5, 3.0, 3.9), "int8"),
}


def weights(shapes: Shapes) -> int:
    """Numbers in all products' weights; the head's apart."""
    heads = shapes.heads
    attention = 2 * shapes.hidden * heads.head_dim * (heads.query_heads + heads.kv_heads)
    return shapes.layers * (attention + 3 * shapes.hidden * shapes.inner)


def loop_of(case: Case) -> Callable[[], object]:
    """Reads as many bytes as the case's weights have; where they are floats, multiplies as often as well."""
    products, head = weights(case.shapes), SHAPES.vocabulary * SHAPES.hidden
    read = WeightMemory().copy(torch.rand((products + head) // (1 if case.floats else 4)))
    if not case.floats:
        return read.sum
    rows = (case.rows * case.tokens * products + case.rows * head) // (COLUMNS * SHAPES.hidden)
    left, right, out = torch.rand(rows, SHAPES.hidden), torch.rand(SHAPES.hidden, COLUMNS), torch.empty(rows, COLUMNS)

    def loop() -> None:
        read.sum()
        torch.mm(left, right, out=out)

    return loop


def cpu_seconds(work: Callable[[], object]) -> float:
    """The thread's CPU time for one `work`, the mean of as many as a coarse clock needs."""
    times, before, took = 0, time.thread_time(), 0.0
    while took < LEAST_SECONDS:
        work()
        times += 1
        took = time.thread_time() - before
    return took / times


def least_ratio(step: Callable[[], object], loop: Callable[[], object]) -> float:
    """The least of the step's times over those of the loop around it."""
    step()
    loop()
    steps, loops = [], [cpu_seconds(loop)]
    for _ in range(ROUNDS):
        steps.append(cpu_seconds(step))
        loops.append(cpu_seconds(loop))
    return min(took / max(loops[at], loops[at + 1]) for at, took in enumerate(steps))


def bound_here(case: Case, variant: str) -> float:
    """The case's bound on this CPU."""
    on_intel = INTEL in Path("/proc/cpuinfo").read_text()
    return max(case.most[variant], MOST_PREFILL_ON_INTEL) if on_intel and case.tokens > 1 else case.most[variant]


@pytest.fixture(scope="module")
def known() -> Sequences:
    return sequences([PREFILL + 1] * MOST_ROWS, SHAPES.vocabulary)


@pytest.fixture(scope="module")
def running(best: CpuLibrary, known: Sequences) -> dict[str, Running]:
    ops = CpuOps(best, Team(best, 1))
    integers = Running(Quantizing(ops, per_channel), OF_INTEGERS, known.num_blocks)
    return {"floats": Running(ops, SHAPES, known.num_blocks), "int8": integers}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step_of(case: Case, known: Sequences) -> StepInputs:
    return known.step([(row, 0 if case.tokens > 1 else CACHED, case.tokens) for row in range(case.rows)])


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="bounds are known for CPUs with AVX2 or AVX-512")
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_about_as_long_as_reading_its_weights_and_multiplying(
    best: CpuLibrary, running: dict[str, Running], known: Sequences, name: str
):
    case = CASES[name]
    model = running[case.kind]
    model(known.step([(row, 0, CACHED) for row in range(case.rows)]))
    inputs = step_of(case, known)
    ratio = least_ratio(lambda: model(inputs), loop_of(case))
    print(f"{best.variant}: {name}: {ratio:.2f}")
    assert ratio < bound_here(case, best.variant), best.variant


def both_at_once(runner: ThreadPoolExecutor, work: Callable[[], object]) -> None:
    other = runner.submit(work)
    work()
    other.result()


def least_shares_of_one(pairs: Sequence[tuple[Callable[[], object], Callable[[], object]]], enough: float) -> list[float]:
    """For each pair (by one thread, by two) the least time of the second over that of the first, all in turns, until the first pair's is
    `enough` or time is up: neighbours need cores too.
    """
    least = [[float("inf")] * 2 for _ in pairs]
    until = time.monotonic() + SECONDS_OF_THREADS
    while time.monotonic() < until and least[0][1] >= enough * least[0][0]:
        for pair, times in zip(pairs, least, strict=True):
            for at, work in enumerate(pair):
                began = time.perf_counter()
                work()
                times[at] = min(times[at], time.perf_counter() - began)
    return [two / one for one, two in least]


@pytest.mark.skipif(usable_cpus() < 2, reason="one core")
@pytest.mark.parametrize("pinned", [False, True])
def test_two_threads_share_a_step(best: CpuLibrary, running: dict[str, Running], known: Sequences, pinned: bool):
    team = Team(best, 2, sorted(os.sched_getaffinity(0))[:2] if pinned else ())
    both = Running(CpuOps(best, team), SHAPES, known.num_blocks)
    for model in (running["floats"], both):
        model(known.step([(row, 0, CACHED) for row in range(8)]))
    inputs = step_of(CASES["decode 8"], known)
    halves = [torch.rand(COLUMNS, COLUMNS) for _ in range(2)]

    def half() -> None:
        torch.mm(*halves)

    def measured() -> list[float]:
        team.settle()
        control = (lambda: (half(), half()), partial(both_at_once, other, half))
        return least_shares_of_one([(partial(running["floats"], inputs), partial(both, inputs)), control], MOST_OF_TWO_THREADS)

    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as runner:
        other.submit(half).result()  # started by a thread that keeps to no core, it keeps to none
        share, possible = runner.submit(measured).result()
    print(f"pinned {pinned}: {share:.2f}, possible {possible:.2f}")
    if share >= MOST_OF_TWO_THREADS and possible > MOST_OF_FREE_CORES:
        pytest.skip(f"no second core was free: two threads took {possible:.2f} of one's time for two products")
    assert share < MOST_OF_TWO_THREADS, f"{possible:.2f} were possible"
