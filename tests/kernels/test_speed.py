"""A step takes no longer than the machine's arithmetic and memory ask for: its time over that of loops measured in the same process.

One thread's CPU time, which does not run while others have the core; each step between two measures of its loop, and the least of several
ratios, since neighbours on the same memory and caches make things slower, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from services.worker.ops.base import HeadShape, StepInputs
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team
from tests.kernels.support import Running, Shapes, sequences

# SmolLM2-135M's shapes with fewer layers and tokens: 68 MB of weights, more than the caches hold.
SHAPES = Shapes(HeadShape(9, 3, 64), hidden=576, inner=1536, vocabulary=4096, layers=4)
PREFILL, CACHED, ROUNDS = 256, 128, 7
# Ratios to the loop: torch's product of as many multiplications, torch's sum of as many bytes.
# Measured 1.0 and 1.2 on an AMD EPYC with AVX-512.
PREFILL_BOUND, DECODE_BOUND = 1.7, 2.0


def weights() -> int:
    """Numbers in all products' weights; the head's apart."""
    heads = SHAPES.heads
    attention = 2 * SHAPES.hidden * heads.head_dim * (heads.query_heads + heads.kv_heads)
    return SHAPES.layers * (attention + 3 * SHAPES.hidden * SHAPES.inner)


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
def running(best: CpuLibrary) -> Running:
    return Running(CpuOps(best, Team(best, 1)), SHAPES, blocks=64)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps() -> tuple[StepInputs, StepInputs]:
    """A prefill, and a decode step behind it."""
    known = sequences([PREFILL + 1], SHAPES.vocabulary)
    return known.step([(0, 0, PREFILL)]), known.step([(0, CACHED, 1)])


def test_a_prefill_takes_about_as_long_as_torchs_product_of_its_size(running: Running):
    prefill, _ = steps()
    columns = 1536
    rows = PREFILL * weights() // (columns * SHAPES.hidden)
    left, right, out = torch.rand(rows, SHAPES.hidden), torch.rand(SHAPES.hidden, columns), torch.empty(rows, columns)
    ratio = least_ratio(lambda: running(prefill), lambda: torch.mm(left, right, out=out))
    assert ratio < PREFILL_BOUND


def test_a_decode_step_takes_about_as_long_as_reading_its_weights(running: Running):
    prefill, decode = steps()
    running(prefill)
    read = torch.rand(weights() + SHAPES.vocabulary * SHAPES.hidden)
    ratio = least_ratio(lambda: running(decode), lambda: read.sum())
    assert ratio < DECODE_BOUND
