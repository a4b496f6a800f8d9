"""What the machine allows now: the memory's read bandwidth and the float32 matrix product, with all cores. Prints JSON.

    python -m bench.peers.ceilings

The floor of a decode step is the weights' bytes over the bandwidth; prefill meets the product. The best of many tries counts: company only
ever makes them slower, on this machine or on others that share its memory. The median tells how steady it was.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch

_READ_BYTES, _SIDE, _SECONDS = 512 << 20, 2048, 1.5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Gigabytes (10^9) read a second, and 10^9 floating-point operations a second of a product of two 2048 x 2048 matrices."""

    read_gb_s: float
    read_median_gb_s: float
    gemm_gflop_s: float


def measure() -> Ceilings:
    """Measures both, in about four seconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(cores)
    parts = np.array_split(np.ones(_READ_BYTES // 8), cores)
    with ThreadPoolExecutor(cores) as threads:
        # A maximum needs one comparison a lane, so that memory alone sets the pace; numpy gives up the interpreter's lock for it.
        read = _tries(lambda: list(threads.map(np.max, parts)))
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    product = _tries(lambda: torch.mm(left, right))
    gb_s = [_READ_BYTES / seconds / 1e9 for seconds in read]
    return Ceilings(max(gb_s), statistics.median(gb_s), 2 * _SIDE**3 / min(product) / 1e9)


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
