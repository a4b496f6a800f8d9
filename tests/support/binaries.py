"""Programs that no Python package brings (redis-server, prometheus, docker): found, or the test is skipped, saying what installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def need(program: str, *, install: str) -> str:
    """The path of `program`. Without it the test is skipped; under CI, which installs everything, it fails instead."""
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"{program} is not installed ({install})"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
