"""What the machine allows now: the memory's read bandwidth and the float32 matrix product, with all cores. Prints JSON.

    python -m bench.peers.ceilings

The floor of a decode step is the weights' bytes over the bandwidth; prefill meets the product. The best of several tries counts: company
only ever makes them slower.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch

_READ_BYTES, _SIDE, _TRIES = 512 << 20, 2048, 8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Gigabytes read a second, and 10^9 floating-point operations a second of a product of two 2048 x 2048 matrices."""

    read_gb_s: float
    gemm_gflop_s: float


def measure() -> Ceilings:
    """Measures both, in about two seconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(cores)
    parts = np.array_split(np.ones(_READ_BYTES // 8), cores)
    with ThreadPoolExecutor(cores) as threads:
        # A maximum needs one comparison a lane, so that memory alone sets the pace; numpy gives up the interpreter's lock for it.
        read = _best(lambda: list(threads.map(np.max, parts)))
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    product = _best(lambda: torch.mm(left, right))
    return Ceilings(_READ_BYTES / read / 1e9, 2 * _SIDE**3 / product / 1e9)


def _best(work: Callable[[], object]) -> float:
    """The least seconds of some tries."""
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
