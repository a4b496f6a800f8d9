"""The loops that show what the machine can do."""

from __future__ import annotations

import ctypes

import pytest
import torch

from bench.limits import measure_limits
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary
from tests.kernels.support import at_the_end


def test_the_loop_on_registers_says_how_many_operations_it_did(ops: CpuOps):
    lanes = {"avx512vnni": 16, "avx512": 16, "avx2": 8, "generic": 4}[ops._library.variant]
    rounds = ops._library.calls.tokenloom_multiply_add_rounds
    rounds.restype = ctypes.c_double
    assert rounds(ops._library.handle, ctypes.c_int64(1000)) == 2 * 1000 * 12 * lanes


@pytest.mark.parametrize("count", [0, 15, 16, 1000, 1024])
def test_reading_ends_within_what_there_is(ops: CpuOps, count: int):
    floats = at_the_end(torch.ones(count))
    ops._library.calls.tokenloom_read_through(ops._library.handle, ctypes.c_void_p(floats.data_ptr()), ctypes.c_int64(count))


def test_limits_are_rates_of_all_threads_together(best: CpuLibrary):
    limits = measure_limits(best, 2, tries=1)
    assert limits.threads == 2
    assert limits.gflops > 0.1
    assert limits.gigabytes > 0.01
