"""What the machine can do at most, measured by the C++ library's own loops: the scale that times are read on.

A ratio to these says how good a kernel is whatever the machine, its clock and its company, as long as both are measured in one run.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier

import torch

from services.worker.ops.native import CpuLibrary
from services.worker.ops.weight_memory import WeightMemory

_ROUNDS = 8_000_000
# Far more than any cache.
READ_FLOATS = 1 << 26


@dataclass(frozen=True, slots=True)
class Limits:
    """Of so many threads together: float operations a second on registers alone, and bytes a second read from memory."""

    threads: int
    gflops: float
    gigabytes: float


def measure_limits(library: CpuLibrary, threads: int, tries: int = 3) -> Limits:
    """The best of `tries` runs of each loop, on `threads` threads at a time. Takes about half a second and 256 MiB."""
    library.calls.tokenloom_multiply_add_rounds.restype = ctypes.c_double

    def multiply(_: int) -> float:
        return float(library.calls.tokenloom_multiply_add_rounds(library.handle, ctypes.c_int64(_ROUNDS)))

    cores = usable_cores()
    with threads_on(cores if len(cores) == threads else (), threads) as pool:
        loops = (multiply, reader(library, threads, READ_FLOATS))
        return Limits(threads, *(max(rate(pool, threads, loop) for _ in range(tries)) / 1e9 for loop in loops))


def usable_cores() -> list[int]:
    """The CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def threads_on(cores: Sequence[int], count: int) -> Iterator[ThreadPoolExecutor]:
    """`count` threads, each kept to one of as many `cores`, where there are any: free to move, two may meet on one core."""
    places, together = itertools.count(), Barrier(count)

    def settle() -> None:
        place = next(places)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cores[place]})

    with ThreadPoolExecutor(count, initializer=settle) as pool:
        list(pool.map(lambda _: together.wait(), range(count)))  # so that all of them have begun
        yield pool


def reader(library: CpuLibrary, threads: int, floats: int) -> Callable[[int], float]:
    """A loop that reads a member's share of so many floats, in large pages as weights lie, and returns the share's bytes."""
    memory, share = WeightMemory().copy(torch.ones(1).expand(floats)), floats // threads

    def read(member: int) -> float:
        at = ctypes.c_void_p(memory.data_ptr() + member * share * memory.element_size())
        library.calls.tokenloom_read_through(library.handle, at, ctypes.c_int64(share))
        return share * memory.element_size()

    return read


def rate(pool: ThreadPoolExecutor, threads: int, loop: Callable[[int], float]) -> float:
    """What `threads` runs of a loop beside each other return, a second."""
    began = time.perf_counter()
    return sum(pool.map(loop, range(threads))) / (time.perf_counter() - began)
