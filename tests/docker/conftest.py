"""One deployment of the minimal profile for all tests here: built, started from clean, and removed with its volumes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.deployment import OTHER_MODEL, Deployment
from tests.support.tiny_llama import make_tiny_llama

# Building takes minutes where nothing is cached yet; each test gets what a slow disk needs, and each wait inside has a bound of its own.
TEST_TIMEOUT_SECONDS = 600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips these tests, with the reason, unless they were asked for and an engine runs."""
    ours = [item for item in items if item.get_closest_marker("docker")]
    reason = "" if not ours else _why_not(config)
    for item in ours:
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(config: pytest.Config) -> str:
    if "docker" not in config.option.markexpr:
        return "builds images and takes minutes: make test-docker"
    if shutil.which("docker") is None:
        return "docker is not installed"
    answer = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        return f"no Docker engine runs here: {answer.stderr.strip() or answer.stdout.strip()}"
    answer = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True, timeout=60, check=False)
    return "" if answer.returncode == 0 else "docker has no compose v2"


@pytest.fixture(scope="session")
def images() -> Iterator[Deployment]:
    """The deployment with its images built, before anything of it runs; removed at the end, whatever happened."""
    # Not pytest's own folder: the containers' user may not enter that.
    models = Path(tempfile.mkdtemp(prefix="tokenloom-models-"))
    models.chmod(0o755)
    for file in make_tiny_llama(models / OTHER_MODEL).iterdir():
        file.chmod(0o644)  # safetensors are saved for their owner alone
    deployment = Deployment(models)
    try:
        started = time.monotonic()
        deployment.compose("build", timeout=540)
        print(f"built in {time.monotonic() - started:.0f} s")
        yield deployment
    finally:
        deployment.remove()
        shutil.rmtree(models)


@pytest.fixture(scope="session")
def mesh(images: Deployment) -> Deployment:
    """The deployment up and healthy, from a clean start: no container, network or volume of it was there."""
    started = time.monotonic()
    images.up()
    print(f"up from clean in {time.monotonic() - started:.0f} s")
    return images
