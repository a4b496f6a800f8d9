"""The collector's configuration: every name in it leads somewhere, and what compose and Prometheus assume of it is so.

The collector itself cannot be had where these tests run; its fields are checked against what its documentation names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.telemetry.otel_environment import ExportSettings
from libs.telemetry.trace_store_otlp import MAX_EXPORT_BYTES

ROOT = Path(__file__).parents[3]
# Fields that the components document (collector-contrib 0.145 and newer).
FIELDS = {
    "health_check": {"endpoint"},
    "otlp": {"protocols"},
    "memory_limiter": {"check_interval", "limit_percentage", "spike_limit_percentage", "limit_mib", "spike_limit_mib"},
    "tail_sampling": {
        "decision_wait",
        "decision_wait_after_root_received",
        "num_traces",
        "expected_new_traces_per_sec",
        "decision_cache",
        "policies",
    },
    "batch": {"timeout", "send_batch_size", "send_batch_max_size"},
    "otlp_grpc": {"endpoint", "tls", "sending_queue", "retry_on_failure"},
}
POLICIES = {"status_code": {"status_codes"}, "latency": {"threshold_ms"}, "probabilistic": {"sampling_percentage"}}
KINDS = ("receivers", "processors", "exporters")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60}[unit]


def default(variable: str) -> float:
    """The default of "${env:NAME:-default}"."""
    return float(re.fullmatch(r"\$\{env:[A-Z_]+:-([^}]+)\}", variable)[1])


def test_every_component_of_a_pipeline_is_declared_and_every_declared_one_is_used(config):
    for kind in KINDS:
        used = {name for pipeline in config["service"]["pipelines"].values() for name in pipeline[kind]}
        assert used == set(config[kind]), kind
    assert set(config["service"]["extensions"]) == set(config["extensions"])


def test_components_have_only_fields_that_their_documentation_knows(config):
    for kind in ("extensions", *KINDS):
        for name, settings in config[kind].items():
            assert set(settings) <= FIELDS[name.partition("/")[0]], name


def test_memory_is_limited_first_and_traces_are_batched_last(config):
    (pipeline,) = config["service"]["pipelines"].values()
    assert pipeline["processors"] == ["memory_limiter", "tail_sampling", "batch"]


def test_failed_slow_and_a_share_of_all_other_traces_are_kept_and_by_default_all(config):
    policies = {policy["type"]: policy for policy in config["processors"]["tail_sampling"]["policies"]}
    assert set(policies) == set(POLICIES)
    for kind, policy in policies.items():
        assert set(policy) == {"name", "type", kind}
        assert set(policy[kind]) <= POLICIES[kind]
    assert policies["status_code"]["status_code"]["status_codes"] == ["ERROR"]
    assert default(policies["probabilistic"]["probabilistic"]["sampling_percentage"]) == 100
    assert default(policies["latency"]["latency"]["threshold_ms"]) == 10_000


def test_decisions_wait_for_the_root_and_for_the_services_next_export(config):
    sampling = config["processors"]["tail_sampling"]
    after_root = seconds(sampling["decision_wait_after_root_received"])
    assert seconds(sampling["decision_wait"]) > after_root > 2 * ExportSettings().delay_ms / 1000
    assert min(sampling["decision_cache"].values()) > sampling["num_traces"]


def test_it_takes_what_the_built_in_store_takes(config):
    grpc = config["receivers"]["otlp"]["protocols"]["grpc"]
    assert grpc["endpoint"] == "0.0.0.0:4317"
    assert grpc["max_recv_msg_size_mib"] * 1024 * 1024 == MAX_EXPORT_BYTES


def test_prometheus_scrapes_the_port_where_it_tells_of_itself(config):
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    port = reader["pull"]["exporter"]["prometheus"]["port"]
    jobs = {job["job_name"]: job for job in yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]}
    assert [found["port"] for found in jobs["otel-collector"]["dns_sd_configs"]] == [port]


def test_compose_and_kubernetes_run_a_collector_that_knows_these_fields_and_compose_sends_the_services_to_it(config):
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    service = compose["services"]["otel-collector"]
    name, _, tag = service["image"].rpartition(":")
    assert name.endswith("opentelemetry-collector-contrib"), "tail_sampling is not in the core distribution"
    kustomization = yaml.safe_load((ROOT / "k8s/components/tracing/kustomization.yaml").read_text())
    tags = [tag, *(image["newTag"] for image in kustomization["images"] if image["name"] == name)]
    assert len(tags) == 2
    assert all(tuple(map(int, version.split(".")[:2])) >= (0, 145) for version in tags)
    assert any("deploy/otel" in volume for volume in service["volumes"])
    assert set(service["environment"]) == set(re.findall(r"\$\{env:(TRACE_\w+)", (ROOT / "deploy/otel/collector.yaml").read_text()))
    environments = [other["environment"] for other in compose["services"].values() if isinstance(other.get("environment"), dict)]
    endpoints = {found for environment in environments if (found := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT"))}
    assert endpoints == {"http://otel-collector:4317"}
