"""A step takes no longer than the machine's arithmetic and memory ask for: its time over that of loops measured in the same process.

One thread's CPU time, which does not run while others have the core; each step between two measures of its loop, and the least of several
ratios, since neighbours on the same memory and caches make things slower, never faster. The loop reads as many bytes as the step's weights
have and multiplies as many matrices, one after the other, by torch: it chooses its instructions by itself, so that a build of ours that
lacks this CPU's fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from services.worker.ops.base import HeadShape, StepInputs
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from services.worker.ops.weight_memory import WeightMemory
from tests.kernels.support import Running, Sequences, Shapes, sequences
from tests.kernels.test_int4 import Quantizing
from tests.support.quantized import per_channel

# SmolLM2-135M's shapes with fewer layers and tokens: 95 MB of weights as floats, more than caches hold.
SHAPES = Shapes(HeadShape(9, 3, 64), hidden=576, inner=1536, vocabulary=4096, layers=6)
MOST_ROWS, PREFILL, CACHED, ROUNDS = 32, 256, 64, 6
# Multiplications that torch does in one product, of SHAPES.hidden x COLUMNS.
COLUMNS = 1536


@dataclass(frozen=True)
class Case:
    """A step of so many rows with so many tokens each. `known`: its time over its loop's on an AMD EPYC of Zen 4; `most`: from where the
    test fails. Twice the time is beyond it there.
    """

    rows: int
    tokens: int
    known: float
    most: float
    kind: str = "floats"

    @property
    def floats(self) -> bool:
        return self.kind == "floats"


CASES = {
    "decode 1": Case(1, 1, 0.8, 1.35),
    "decode 8": Case(8, 1, 0.65, 1.2),
    "decode 32": Case(32, 1, 0.9, 1.4),
    "prefill": Case(1, PREFILL, 0.9, 1.6),
    "decode 1, int8": Case(1, 1, 1.7, 3.0, "int8"),
}


def weights() -> int:
    """Numbers in all products' weights; the head's apart."""
    heads = SHAPES.heads
    attention = 2 * SHAPES.hidden * heads.head_dim * (heads.query_heads + heads.kv_heads)
    return SHAPES.layers * (attention + 3 * SHAPES.hidden * SHAPES.inner)


def loop_of(case: Case) -> Callable[[], object]:
    """Reads as many bytes as the case's weights have; where they are floats, multiplies as often as well."""
    head = SHAPES.vocabulary * SHAPES.hidden
    read = WeightMemory().copy(torch.rand((weights() + head) // (1 if case.floats else 4)))
    if not case.floats:
        return read.sum
    rows = (case.rows * case.tokens * weights() + case.rows * head) // (COLUMNS * SHAPES.hidden)
    left, right, out = torch.rand(rows, SHAPES.hidden), torch.rand(SHAPES.hidden, COLUMNS), torch.empty(rows, COLUMNS)

    def loop() -> None:
        read.sum()
        torch.mm(left, right, out=out)

    return loop


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def least_ratio(step: Callable[[], object], loop: Callable[[], object]) -> float:
    """The least of the step's times over those of the loop around it."""
    step()
    loop()
    steps, loops = [], [cpu_seconds(loop)]
    for _ in range(ROUNDS):
        steps.append(cpu_seconds(step))
        loops.append(cpu_seconds(loop))
    return min(took / max(loops[at], loops[at + 1]) for at, took in enumerate(steps))


@pytest.fixture(scope="module")
def known() -> Sequences:
    return sequences([PREFILL + 1] * MOST_ROWS, SHAPES.vocabulary)


@pytest.fixture(scope="module")
def running(best: CpuLibrary, known: Sequences) -> dict[str, Running]:
    ops = CpuOps(best, Team(best, 1))
    return {"floats": Running(ops, SHAPES, known.num_blocks), "int8": Running(Quantizing(ops, per_channel), SHAPES, known.num_blocks)}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step_of(case: Case, known: Sequences) -> StepInputs:
    return known.step([(row, 0 if case.tokens > 1 else CACHED, case.tokens) for row in range(case.rows)])


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_about_as_long_as_reading_its_weights_and_multiplying(running: dict[str, Running], known: Sequences, name: str):
    case = CASES[name]
    model = running[case.kind]
    model(known.step([(row, 0, CACHED) for row in range(case.rows)]))
    inputs = step_of(case, known)
    ratio = least_ratio(lambda: model(inputs), loop_of(case))
    assert ratio < case.most, f"{case.known} is known"
