"""What the machine can do at most, measured by the C++ library's own loops: the scale that times are read on.

A ratio to these says how good a kernel is whatever the machine, its clock and its company, as long as both are measured in one run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.worker.ops.native import CpuLibrary
from services.worker.ops.weight_memory import WeightMemory

_ROUNDS = 8_000_000
# Far more than any cache.
_READ_FLOATS = 1 << 26


@dataclass(frozen=True, slots=True)
class Limits:
    """Of so many threads together: float operations a second on registers alone, and bytes a second read from memory."""

    threads: int
    gflops: float
    gigabytes: float


def measure_limits(library: CpuLibrary, threads: int, tries: int = 3) -> Limits:
    """The best of `tries` runs of each loop, on `threads` threads at a time. Takes about half a second and 256 MiB."""
    floats = WeightMemory().copy(torch.ones(1).expand(_READ_FLOATS))  # in large pages, as weights lie
    share = _READ_FLOATS // threads
    library.calls.tokenloom_multiply_add_rounds.restype = ctypes.c_double

    def multiply(_: int) -> float:
        return float(library.calls.tokenloom_multiply_add_rounds(library.handle, ctypes.c_int64(_ROUNDS)))

    def read(member: int) -> float:
        at = ctypes.c_void_p(floats.data_ptr() + member * share * floats.element_size())
        library.calls.tokenloom_read_through(library.handle, at, ctypes.c_int64(share))
        return share * floats.element_size()

    with ThreadPoolExecutor(threads) as pool:
        return Limits(threads, *(max(_rate(pool, threads, loop) for _ in range(tries)) / 1e9 for loop in (multiply, read)))


def _rate(pool: ThreadPoolExecutor, threads: int, loop: Callable[[int], float]) -> float:
    began = time.perf_counter()
    return sum(pool.map(loop, range(threads))) / (time.perf_counter() - began)
