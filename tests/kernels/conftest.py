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


@pytest.fixture(scope="session", params=["", "avx512", "avx2", "generic"])
def ops(request: pytest.FixtureRequest, library: Path) -> CpuOps:
    """With the best instruction set, and with those of other machines."""
    chosen = _ops(library, request.param)
    if request.param and chosen._library.variant == CpuLibrary(library).variant:
        pytest.skip("the best instruction set once more")
    return chosen


@pytest.fixture(scope="session", params=["avx512vnni", "avx512", "avx2", "generic"])
def integer_ops(request: pytest.FixtureRequest, library: Path) -> CpuOps:
    """With each instruction set: products of integers are written for each of them, all else is compiled."""
    return _ops(library, request.param)


def _ops(library: Path, variant: str) -> CpuOps:
    try:
        chosen = CpuLibrary(library, variant)
    except TokenloomError:
        pytest.skip(f"this CPU has no {variant}")
    return CpuOps(chosen, Team(chosen, 2))
