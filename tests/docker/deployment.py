"""A deployment by docker-compose.yml for tests: a project, ports and volumes of its own, driven through docker's command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"
# Below the folder that is mounted; tiny and random.
OTHER_MODEL = "tiny"


class Deployment:
    """One compose project, serving from a folder of models. Its name is unique, so that it meets no other on the same engine.

    `settings` are the variables of .env that differ from it; a test may change them before the next `up`.
    """

    def __init__(self, models: Path) -> None:
        self.project = f"tokenloom-test-{uuid.uuid4().hex[:8]}"
        self.port = free_port()
        self.settings = {"PORT": str(self.port), "BIND": "127.0.0.1", "MODEL": "", "SERVED_MODEL_NAME": "", "MODELS_DIR": str(models)}
        self.settings |= {"WHEELS": _wheels(), "REDIS_USER": _owner_of_redis_data()}

    @property
    def url(self) -> str:
        """Envoy's edge on this machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.settings}

    def compose(self, *arguments: str, timeout: float = 120) -> str:
        """Runs `docker compose` on the project and returns what it printed. Fails the test, with that output, when compose fails."""
        command = ["docker", "compose", "--project-name", self.project, "--profile", "minimal", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-4000:]}\n{self._state()}"
        return done.stdout

    def up(self, *arguments: str) -> None:
        """Starts what does not run yet, and waits until everything is healthy."""
        self.compose("up", "--detach", "--wait", "--no-build", *arguments, timeout=240)

    def containers(self, service: str) -> list[str]:
        """The ids of a service's running containers."""
        return self.compose("ps", "--quiet", service).split()

    def remove(self) -> None:
        """Removes containers, networks and volumes. The images stay: the next build is then one of seconds."""
        subprocess.run(
            ["docker", "compose", "--project-name", self.project, "--profile", "minimal", "down", "--volumes", "--timeout", "5"],
            cwd=ROOT,
            env=self._env,
            capture_output=True,
            timeout=180,
            check=False,
        )

    def image(self, service: str) -> str:
        """The tag of a service's image."""
        return str(json.loads(self.compose("config", "--format", "json"))["services"][service]["image"])

    def _state(self) -> str:
        """For the message of a failure: what runs, and what the services said last."""
        command = ["docker", "compose", "--project-name", self.project, "--profile", "minimal"]
        shown = [
            subprocess.run([*command, *more], cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=60, check=False).stdout
            for more in (["ps", "--all"], ["logs", "--no-color", "--tail", "15"])
        ]
        return "\n".join(shown)[-12000:]


def docker(*arguments: str, timeout: float = 60) -> str:
    """Runs `docker` and returns its standard output. Fails the test when it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
    return done.stdout.strip()


def inspect(container: str) -> dict[str, Any]:
    """What the engine knows of a container."""
    found: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return found


def succeeds(*arguments: str) -> bool:
    """Whether `docker` with these arguments ends with 0."""
    return subprocess.run(["docker", *arguments], capture_output=True, timeout=60, check=False).returncode == 0


def python_in(container: str, program: str) -> str:
    """What a Python program prints in a running container."""
    return docker("exec", container, "python", "-c", program)


def metric(container: str, port: int, name: str) -> float:
    """The sum over all labels of one metric of the service in a container."""
    page = python_in(
        container, f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics', timeout=5).read().decode())"
    )
    values = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(values)


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Waits until `holds`, asking a few times a second; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.3)


def _wheels() -> str:
    """A folder with torch's wheel where pip's own settings name one (machines that cannot reach its index), else the repository's."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    folders = [line.partition("=")[2].strip("'\" ") for line in settings.splitlines() if "find-links" in line]
    return next((folder for folder in folders if any(Path(folder).glob("torch-*.whl"))), str(ROOT / "deploy" / "wheels"))


def _owner_of_redis_data() -> str:
    """Who writes /data in the image of Redis that is here: 999:999 in the official one, another in a distribution's."""
    return docker("run", "--rm", "--entrypoint", "stat", "redis:7-bookworm", "-c", "%u:%g", "/data", timeout=180)
