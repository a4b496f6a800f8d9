"""What is in the images, and what is not."""

import json
import tomllib

import pytest

from tests.docker.deployment import ROOT, Deployment, docker, succeeds

pytestmark = pytest.mark.docker

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "model")
WITHOUT_TORCH = ("gateway", "tokenizer", "scheduler", "model")


def in_image(images: Deployment, service: str, *command: str) -> bool:
    """Whether a program ends with 0 in a fresh container of a service's image, confined as compose confines it."""
    confined = ["--read-only", "--cap-drop=ALL", "--network=none", "--tmpfs=/tmp"]
    return succeeds("run", "--rm", *confined, f"--entrypoint={command[0]}", images.image(service), *command[1:])


@pytest.mark.parametrize("service", WITHOUT_TORCH)
def test_an_image_that_computes_nothing_has_no_torch(images, service):
    assert not in_image(images, service, "python", "-c", "import torch")


def test_the_worker_imports_torch_without_cuda(images):
    assert in_image(images, "worker", "python", "-c", "import torch; assert torch.version.cuda is None; import services.worker.engine")


@pytest.mark.parametrize("service", SERVICES)
def test_no_image_carries_weights_or_a_compiler(images, service):
    search = "! find / -xdev \\( -name '*.gguf' -o -name '*.safetensors' \\) | grep . && ! command -v gcc g++ cc c++ clang make"
    assert in_image(images, service, "sh", "-c", search)


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_as_a_numbered_user_who_may_write_nothing_but_the_model(images, service):
    paths = ("/", "/etc", "/opt/tokenloom", "/opt/tokenloom/bin", "/usr/local")
    program = f"import os; assert os.getuid() == 65532; assert all(os.stat(path).st_uid == 0 for path in {paths})"
    assert in_image(images, service, "python", "-c", program)


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_says_which_version_it_is(images, service):
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", images.image(service)))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert labels["org.opencontainers.image.version"] == version
    assert labels["org.opencontainers.image.revision"]
    assert labels["org.opencontainers.image.source"].startswith("https://")


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler", "worker"])
def test_a_services_image_has_only_what_its_extra_asks_for(images, service):
    unwanted = {"gateway": "tokenizers", "tokenizer": "starlette", "scheduler": "numpy", "worker": "uvicorn"}[service]
    assert in_image(images, service, "python", "-c", f"import services.{service}.__main__")
    assert not in_image(images, service, "python", "-c", f"import {unwanted}")


def test_the_workers_kernels_are_built_for_every_instruction_set_and_load_without_a_compiler(images):
    program = (
        "from services.worker.kernels.cpu.build import ensure_library, variants; from services.worker.ops.native import CpuLibrary\n"
        "library = ensure_library(); code = library.read_bytes(); CpuLibrary(library)\n"
        "assert all(f'tokenloom_variant_{isa}'.encode() in code for isa in variants())"
    )
    assert in_image(images, "worker", "python", "-c", program)


def test_the_health_check_finds_nobody_where_nobody_listens(images):
    assert not in_image(images, "tokenizer", "/usr/local/bin/python3", "-I", "-S", "/opt/tokenloom/healthcheck.py", "grpc", "7001")
