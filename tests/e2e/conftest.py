"""Meshes of real processes with the real model, one per set of flags and session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mesh import Mesh
from tests.support.reference import Reference


def _mesh(factory: pytest.TempPathFactory, *args: str) -> Iterator[Mesh]:
    mesh = Mesh.start(factory.mktemp("mesh"), *args)
    yield mesh
    assert mesh.stop() == 0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Mesh]:
    """The mesh as a new user starts it."""
    yield from _mesh(tmp_path_factory)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    """transformers' model over our weights."""
    return Reference(model_dir)
