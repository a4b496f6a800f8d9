"""The built library, and the operations of each instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import TokenloomError
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.cpu import CpuOps
from services.worker.ops.cpu_kernels import CpuKernels


@pytest.fixture(scope="session")
def library() -> Path:
    return ensure_library()


@pytest.fixture(params=["avx512", "avx2", "generic"])
def ops(request: pytest.FixtureRequest, library: Path) -> CpuOps:
    try:
        return CpuOps(CpuKernels(library, request.param))
    except TokenloomError:
        pytest.skip(f"this CPU has no {request.param}")
