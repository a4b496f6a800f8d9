"""A tiny byte-level vocabulary and both backends over it."""

from __future__ import annotations

import pytest

from libs.models.directory import ModelDirectory
from services.worker.constraints.base import Backend
from services.worker.constraints.registry import load_backend
from tests.support.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make_tiny_llama(tmp_path_factory.mktemp("constraints") / "tiny"))


@pytest.fixture(scope="session", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest, tiny_model: ModelDirectory) -> Backend:
    return load_backend(request.param, tiny_model)


@pytest.fixture(scope="session")
def llguidance(tiny_model: ModelDirectory) -> Backend:
    return load_backend("llguidance", tiny_model)
