"""The built library, and the operations of each instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import TokenloomError
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Team


@pytest.fixture(scope="session")
def library() -> Path:
    return ensure_library()


@pytest.fixture(scope="session")
def best(library: Path) -> CpuLibrary:
    """The library with the best instruction set that this CPU has."""
    return CpuLibrary(library)


@pytest.fixture(scope="session", params=["avx512", "avx2", "generic"])
def ops(request: pytest.FixtureRequest, library: Path) -> CpuOps:
    try:
        chosen = CpuLibrary(library, request.param)
    except TokenloomError:
        pytest.skip(f"this CPU has no {request.param}")
    return CpuOps(chosen, Team(chosen, 2))
