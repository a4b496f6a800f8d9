"""What the machine allows now: the memory's read bandwidth and the float32 matrix product, with all cores. Prints JSON.

    python -m bench.peers.ceilings

The floor of a decode step is the weights' bytes over the bandwidth; prefill meets the product. Memory is read as a step reads it: by the
kernels' own loop (bench/limits.py's), from memory of the kind in which packed weights lie, by one thread on each core. Threads that are
free to move may meet on one core, and pages of 4 KiB read slower than a step does, which has pages of 2 MiB.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.limits import READ_FLOATS, rate, reader, threads_on, usable_cores
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.native import CpuLibrary

_SIDE, _SECONDS = 2048, 2.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Gigabytes (10^9) read a second, and 10^9 floating-point operations a second of a product of two 2048 x 2048 matrices.

    `variant` is the kernels' instruction set, `huge_pages` what the system says of transparent huge pages.
    """

    read_gb_s: float
    read_median_gb_s: float
    gemm_gflop_s: float
    variant: str
    huge_pages: str


def measure() -> Ceilings:
    """Measures both, in about five seconds."""
    cores = usable_cores()
    library = CpuLibrary(ensure_library())
    gb_s = _read(library, cores)
    torch.set_num_threads(len(cores))
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    product = _tries(lambda: torch.mm(left, right))
    huge_pages = _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.is_file() else "unknown"
    return Ceilings(max(gb_s), statistics.median(gb_s), 2 * _SIDE**3 / min(product) / 1e9, library.variant, huge_pages)


def _read(library: CpuLibrary, cores: list[int]) -> list[float]:
    """Gigabytes a second of each time that all cores together read the memory through."""
    loop, rates = reader(library, len(cores), READ_FLOATS), list[float]()
    with threads_on(cores, len(cores)) as pool:
        _tries(lambda: rates.append(rate(pool, len(cores), loop) / 1e9))
    return rates


def _tries(work: Callable[[], object]) -> list[float]:
    """The seconds that some work took each time, over a second or two."""
    times: list[float] = []
    while sum(times) < _SECONDS:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
