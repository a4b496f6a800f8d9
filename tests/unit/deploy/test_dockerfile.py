"""deploy/Dockerfile without building it: lint, stages, and that it agrees with the rest of the repository."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.requirements import requirements
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
# What listens where is agreed with docker-compose.yml, k8s/ and deploy/: gRPC or HTTP first, then metrics.
PORTS = {"gateway": ["8000"], "tokenizer": ["7001", "9100"], "scheduler": ["50052", "9100"], "worker": ["50051", "9100"]}
CONFIGS = {"gateway": GatewayConfig, "tokenizer": TokenizerConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}


def stages() -> dict[str, list[str]]:
    """Each stage's instructions, lines joined, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.startswith("FROM "):
            current = found.setdefault(line.rpartition(" AS ")[2], [])
        current.append(" ".join(line.split()))
    return found


def sources(copy: str) -> list[str]:
    """What a COPY line copies."""
    return [word for word in copy.split()[1:-1] if not word.startswith("--")]


def environment(stage: str) -> dict[str, str]:
    """A stage's own ENV."""
    words = [word for line in stages()[stage] if line.startswith("ENV ") for word in shlex.split(line)[1:]]
    return dict(word.split("=", 1) for word in words)


def test_it_is_clean_for_the_linter():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "deploy/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_it_begins_with_no_frontend_that_would_have_to_be_pulled():
    assert not re.search(r"^#\s*syntax=", DOCKERFILE, re.MULTILINE)


def test_one_image_of_others_is_the_base_of_all():
    names = set(stages())
    bases = {line.split()[1] for lines in stages().values() for line in lines if line.startswith("FROM ")}
    assert bases - names == {"python:3.11-slim", "scratch"}


@pytest.mark.parametrize("service", [*PORTS, "models"])
def test_a_services_image_comes_from_the_stage_that_drops_every_right_and_runs_nothing_as_root(service):
    lines = stages()[service]
    assert lines[0] == f"FROM service AS {service}"
    assert "USER 65532:65532" in stages()["service"]
    assert not [line for line in lines if line.startswith(("USER", "RUN", "ADD"))]
    [entry] = [line for line in lines if line.startswith("ENTRYPOINT")]
    assert entry.startswith('ENTRYPOINT ["'), "a shell would be process 1 and keep SIGTERM to itself"


@pytest.mark.parametrize("service", [*PORTS, "models"])
def test_an_image_gets_the_dependencies_of_its_own_service_alone(service):
    sources = [re.search(r"--from=(\S+)", line).group(1) for line in stages()[service] if line.startswith("COPY")]
    assert set(sources) == {f"{service}-dependencies", "wheel"} | ({"kernels"} if service == "worker" else set())
    assert f"requirements.py {service} " in " ".join(stages()[f"{service}-dependencies"])


@pytest.mark.parametrize("service", PORTS)
def test_it_listens_where_compose_and_kubernetes_look_for_it_and_asks_there_for_its_health(service):
    lines, env = stages()[service], environment(service)
    assert f"EXPOSE {' '.join(PORTS[service])}" in lines
    if service == "gateway":
        assert (env["TOKENLOOM_HOST"], env["TOKENLOOM_PORT"]) == ("0.0.0.0", "8000")
    else:
        assert env["TOKENLOOM_LISTEN"] == f"0.0.0.0:{PORTS[service][0]}"
        assert (env["TOKENLOOM_METRICS_HOST"], env["TOKENLOOM_METRICS_PORT"]) == ("0.0.0.0", PORTS[service][1])
    [health] = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert f'"{PORTS[service][0]}"' in health
    assert "--start-interval=2s" in health


@pytest.mark.parametrize("service", PORTS)
def test_its_settings_are_ones_that_the_service_knows(service):
    given = {name.removeprefix("TOKENLOOM_").lower() for name in environment(service) if name.startswith("TOKENLOOM_")} - {"cache"}
    assert given <= set(CONFIGS[service].model_fields)


def test_the_version_is_the_projects():
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    assert f"ARG VERSION={version}" in stages()["service"]
    assert f"VERSION={version}" in (ROOT / ".env").read_text().splitlines()


def test_what_it_copies_is_in_the_repository_and_let_through_to_the_builder():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    assert "*" in ignore
    for lines in stages().values():
        for line in lines:
            if line.startswith("COPY ") and "--from=" not in line:
                for source in sources(line):
                    assert (ROOT / source).exists(), source
                    assert any(source == one or source.startswith(f"{one}/") for one in allowed), source


def test_files_copied_straight_into_an_image_are_readable_whatever_the_umask_of_the_checkout():
    final = ("service", *PORTS, "models")
    copies = [line for stage in final for line in stages()[stage] if line.startswith("COPY ") and "--from=" not in line]
    assert copies
    assert all("--chmod=0644" in line for line in copies)


def test_what_goes_to_the_builder_is_used():
    allowed = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {source for lines in stages().values() for line in lines if line.startswith("COPY ") for source in sources(line)}
    assert all((ROOT / one).exists() for one in allowed)
    assert set(allowed) <= copied


def test_the_kernels_are_built_from_what_the_builder_is_given(tmp_path):
    """The stage copies a few files so that nothing else builds them anew: with more imports the build would break, minutes later."""
    copies = [line.split()[1:] for line in stages()["kernels"] if line.startswith("COPY ")]
    files = [source for *sources, _ in copies for source in sources]
    for file in files:
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / file), str(target)], check=True)
    program = "import services.worker.kernels.cpu.build as build; print(sorted(build.variants()))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_requirements_are_the_common_ones_and_the_extras():
    base, gateway = requirements("base", PYPROJECT), requirements("gateway", PYPROJECT)
    assert any(line.startswith("grpcio>=") for line in base)
    assert set(base) < set(gateway)
    assert any(line.startswith("starlette") for line in gateway)
    assert not any(line.startswith("torch") for line in gateway)
    with pytest.raises(KeyError):
        requirements("nothing", PYPROJECT)
