"""docker-compose.yml without an engine: what each combination of files and profiles starts, and what holds for every service."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from tests.support.binaries import need

ROOT = Path(__file__).parents[3]
MESH = {"gateway", "tokenizer", "scheduler", "worker"}
MINIMAL = MESH | {"model", "redis", "envoy"}
OBSERVABILITY = {"otel-collector", "jaeger", "prometheus", "grafana"}
GPU = ("--file", "docker-compose.yml", "--file", "docker-compose.gpu.yml")
# What a service must have ended by itself within, after SIGTERM: its own drain, or for the worker its last step.
_CONFIGS = {"gateway": GatewayConfig, "tokenizer": TokenizerConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}


@functools.cache
def compose(*arguments: str, **env: str) -> str:
    """What `docker compose ARGUMENTS config` prints; the shell's own variables that .env has are left out, `env` is added."""
    docker = need("docker", install="tools/install_compose.sh")
    names = {line.partition("=")[0] for line in (ROOT / ".env").read_text().splitlines()}
    clean = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("COMPOSE_")}
    *flags, last = arguments
    command = [docker, "compose", *flags, "config", *last.split()]
    done = subprocess.run(command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    return done.stdout


@functools.cache
def services(*flags: str, **env: str) -> dict[str, dict[str, Any]]:
    """The services that would start, as compose understands them."""
    return dict(json.loads(compose(*flags, "--format json", **env))["services"])


def seconds(duration: str) -> float:
    """Go's way to write a duration."""
    parts = re.findall(r"([\d.]+)(h|ms|m|s)", duration)
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1, "ms": 0.001}[unit] for number, unit in parts)


def targets(service: dict[str, Any]) -> set[str]:
    """Where things are mounted in a service's containers."""
    return {volume["target"] for volume in service.get("volumes", ())}


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        ((), {}, MINIMAL | OBSERVABILITY),
        (("--profile", "minimal"), {}, MINIMAL),
        (("--profile", "observability"), {}, MINIMAL | OBSERVABILITY),
        ((), {"COMPOSE_PROFILES": ""}, MINIMAL),
        (("--profile", "cli"), {}, MINIMAL | {"cli"}),
        (GPU, {}, MINIMAL | OBSERVABILITY),
        ((*GPU, "--profile", "minimal"), {}, MINIMAL),
    ],
    ids=["plain", "minimal", "observability", "no profile", "cli", "gpu", "gpu minimal"],
)
def test_each_combination_is_valid_and_starts_what_it_should(flags, env, expected):
    assert set(compose(*flags, "--services", **env).split()) == expected


def test_every_service_is_confined_bounded_and_kept_running():
    for name, service in services().items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert service["logging"]["options"]["max-size"], name
        assert service["restart"] == ("no" if name == "model" else "unless-stopped"), name
        assert not service.get("privileged")


def test_what_is_not_ours_runs_under_a_number_too():
    for name, service in services().items():
        if "build" not in service:
            assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name


def test_every_image_of_others_is_pinned_by_a_tag():
    for name, service in services().items():
        tag = service["image"].rpartition(":")[2]
        assert re.search(r"\d", tag), f"{name}: {service['image']}"


def test_our_images_have_the_projects_version_and_a_target_each():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in [*MESH, "model"]:
        service = services()[name]
        target = {"model": "models"}.get(name, name)
        assert service["image"] == f"tokenloom/{target}:{version}"
        assert service["build"]["target"] == target
        assert service["build"]["args"]["VERSION"] == version


def test_what_is_built_here_is_never_asked_of_a_registry():
    ours = [service for service in services("--profile", "observability", "--profile", "cli").values() if "build" in service]
    assert ours
    assert {service.get("pull_policy") for service in ours} == {"never"}


def test_nobody_is_administrator_of_grafana_and_it_fetches_nothing():
    settings = services("--profile", "observability")["grafana"]["environment"]
    assert (settings["GF_AUTH_ANONYMOUS_ORG_ROLE"], settings["GF_AUTH_BASIC_ENABLED"]) == ("Viewer", "false")
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == settings["GF_PLUGINS_PREINSTALL_DISABLED"] == "true"


def test_what_is_scaled_has_neither_a_name_nor_a_port_of_its_own():
    for name in MESH:
        assert "container_name" not in services()[name]
        assert "ports" not in services()[name]
    assert int(services()["tokenizer"].get("scale") or services()["tokenizer"]["deploy"]["replicas"]) == 2


def test_only_the_edge_and_the_observers_pages_are_published_and_on_this_machine_alone():
    published = {name: service["ports"] for name, service in services().items() if service.get("ports")}
    assert set(published) == {"envoy", "jaeger", "prometheus", "grafana"}
    assert {port["host_ip"] for ports in published.values() for port in ports} == {"127.0.0.1"}
    assert published["envoy"][0]["target"] == 8080
    opened = services(BIND="0.0.0.0", PORT="80")["envoy"]["ports"][0]
    assert (opened["host_ip"], opened["published"]) == ("0.0.0.0", "80")


def test_the_mesh_reaches_nothing_outside():
    whole = json.loads(compose("--format json"))
    assert whole["networks"]["mesh"]["internal"]
    for name in MESH | {"redis", "otel-collector"}:
        assert set(services()[name]["networks"]) == {"mesh"}, name


def test_the_start_is_ordered_by_health_and_ends_in_no_circle():
    conditions = {name: {on: how["condition"] for on, how in service.get("depends_on", {}).items()} for name, service in services().items()}
    for reader in ("tokenizer", "worker"):
        assert conditions[reader]["model"] == "service_completed_successfully"
    assert {conditions["scheduler"][name] for name in ("worker", "tokenizer", "redis")} == {"service_healthy"}
    assert conditions["gateway"]["scheduler"] == "service_healthy"
    # The other way round they would wait for each other: a gateway becomes ready through Envoy, which leads to the tokenizers.
    assert conditions["envoy"] == {"gateway": "service_started"}
    assert "envoy" not in conditions["gateway"]


def test_nothing_waits_for_what_observes_it():
    for name in MINIMAL:
        for on, how in services()[name].get("depends_on", {}).items():
            assert how["required"] == (on not in OBSERVABILITY), (name, on)


@pytest.mark.parametrize("name", sorted(MESH))
def test_a_service_has_more_time_to_end_than_it_takes_to_drain(name):
    fields = _CONFIGS[name].model_fields
    drain = fields["drain_timeout"].default if "drain_timeout" in fields else 10.0
    delay = fields["drain_delay"].default if "drain_delay" in fields else 0.0
    assert seconds(services()[name]["stop_grace_period"]) > drain + delay


def test_envoy_has_more_time_to_end_than_its_drain_may_take():
    script = (ROOT / "deploy" / "envoy" / "envoy.sh").read_text()
    defaults = {name: float(value) for name, value in re.findall(r"\$\{(ENVOY_DRAIN_\w+):-(\d+)\}", script)}
    given = {name: float(value) for name, value in services()["envoy"]["environment"].items() if name in defaults}
    assert set(defaults) == {"ENVOY_DRAIN_DELAY", "ENVOY_DRAIN_TIMEOUT"}
    assert seconds(services()["envoy"]["stop_grace_period"]) > sum((defaults | given).values())


def test_settings_are_ones_that_the_services_know():
    for name in MESH:
        known = set(_CONFIGS[name].model_fields)
        given = [key for key in services()[name]["environment"] if key.startswith("TOKENLOOM_")]
        assert given
        assert {key.removeprefix("TOKENLOOM_").lower() for key in given} <= known


def test_addresses_name_services_of_this_file_and_ports_that_they_listen_on():
    listening = {"scheduler": "50052", "worker": "50051", "tokenizer": "7001", "envoy": "7000", "redis": "6379", "otel-collector": "4317"}
    found = []
    for name in MESH:
        for key, value in services()[name]["environment"].items():
            if key.endswith(("_ADDRESS", "_ENDPOINT")) or key == "TOKENLOOM_STORE":
                host, port = re.fullmatch(r"(?:\w+://)?([\w-]+):(\d+)(?:/\d+)?", value).groups()
                assert listening[host] == port, (name, key, value)
                found.append((name, host))
    assert ("gateway", "envoy") in found
    assert ("gateway", "scheduler") in found
    assert ("scheduler", "tokenizer") in found


def test_the_model_is_written_by_one_and_read_by_those_who_need_it():
    for name, service in services().items():
        mounts = {volume["source"]: volume for volume in service.get("volumes", ()) if volume["type"] == "volume"}
        if name in ("tokenizer", "worker"):
            assert mounts["model"]["read_only"]
        else:
            assert ("model" in mounts) == (name == "model")


def test_mounted_files_are_in_the_repository_and_read_only():
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert volume["read_only"], name
                assert Path(volume["source"]).exists() or name == "model", volume["source"]


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "SmolLM2-135M-Instruct"),
        ({"MODEL": "org/model"}, "org/model"),
        ({"MODEL": "mine", "SERVED_MODEL_NAME": "alias"}, "alias"),
        ({"SERVED_MODEL_NAME": "alias"}, "alias"),
    ],
)
def test_one_variable_names_the_model_and_another_may_rename_it(env, name):
    found = services(**env)
    assert found["gateway"]["environment"]["TOKENLOOM_SERVED_MODEL_NAME"] == name
    assert found["model"]["environment"]["MODEL"] == env.get("MODEL", "")


def test_the_packaged_model_is_called_as_the_catalogue_calls_it():
    catalog = (ROOT / "libs" / "models" / "catalog.py").read_text()
    assert f'name="{services()["gateway"]["environment"]["TOKENLOOM_SERVED_MODEL_NAME"]}"' in catalog


def test_the_gpu_file_changes_the_worker_alone_and_its_image_is_another():
    plain, gpu = services(), services(*GPU)
    assert {name for name in plain if plain[name] != gpu[name]} == {"worker"}
    assert gpu["worker"]["image"] != plain["worker"]["image"]
    [device] = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "/cpu" not in gpu["worker"]["build"]["args"]["TORCH_INDEX"]


def test_the_worker_of_the_gpu_file_still_says_that_it_computes_on_cpus():
    """When an executor for CUDA is there, this file's first lines are to be written anew."""
    choices = str(WorkerConfig.model_fields["kernels"].annotation)
    assert "cuda" not in choices
    assert "computes on CPUs" in (ROOT / "docker-compose.gpu.yml").read_text()


def test_defaults_stand_in_env_and_are_the_same_where_the_file_repeats_them():
    """Without .env (`--env-file` another one) the file's own defaults hold: they must not be others."""
    declared = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#"))
    text = (ROOT / "docker-compose.yml").read_text()
    repeated = dict(re.findall(r"\$\{(\w+):-([^{}$]*)\}", text))
    used = set(re.findall(r"\$\{(\w+)", text)) | {"COMPOSE_PROFILES", "TRACE_KEEP_PERCENT", "TRACE_KEEP_SLOW_MS"}
    assert set(declared) <= used
    for name, value in repeated.items():
        if declared.get(name):
            assert value == declared[name], name
