"""Renderings of the overlays, each made once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import yaml

from tools.k8s_check.manifests import LOADER, Cluster
from tools.k8s_check.rendering import Variant, render


@cache
def _documents(overlay: str, components: tuple[str, ...]) -> list:
    return list(yaml.load_all(render(Variant(overlay, components)), LOADER))


@pytest.fixture(scope="session")
def rendered() -> Callable[..., Cluster]:
    """rendered("cpu", "monitoring"): a copy of its manifests that a test may break."""
    return lambda overlay, *components: Cluster(copy.deepcopy(_documents(overlay, components)))
