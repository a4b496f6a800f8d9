"""What manifests repeat of the code, of compose, of the images and of Envoy's and Prometheus' files is the same there and here."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli import main as command_line
from cli import model as model_command
from cli.flags import SERVICES as CONFIGS
from libs.config import parse
from libs.models.catalog import DEFAULT_MODEL
from libs.rpc import LIVE
from tests.support.deployments import SERVICES, compose_services, compose_start, kubernetes_start, stage
from tools import prometheus_rule
from tools.k8s_check import quantities
from tools.k8s_check.pods import grace_seconds, pre_stop_seconds
from tools.k8s_check.rendering import ROOT, Variant, components, variants

EVERYTHING = [variant for variant in variants() if len(variant.components) != 1]
# What a service needs beside its drain to close streams and send its last spans; a worker drains only its running step.
MARGIN, LAST_STEP = 5.0, 10.0
# The longest that cluster DNS answers from its cache (the default of CoreDNS in kubeadm's clusters, kind and minikube).
DNS_SECONDS = 30


def service(cluster, name):
    return cluster.workload(name).containers[-1]


def config_of(monkeypatch, cluster, name):
    """The service's settings, read as the service reads them from the manifest's environment and nothing else."""
    for variable in [variable for variable in os.environ if variable.startswith(("TOKENLOOM_", "OTEL_"))]:
        monkeypatch.delenv(variable)
    for variable, value in kubernetes_start(service(cluster, name), cluster).env.items():
        monkeypatch.setenv(variable, value)
    return parse(CONFIGS[name], [], prog=name)


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("variant", EVERYTHING, ids=str)
def test_a_service_has_every_setting_that_it_is_given_and_takes_the_value(monkeypatch, rendered, variant, name):
    cluster = rendered(variant.overlay, *variant.components)
    config = config_of(monkeypatch, cluster, name)
    given = {key.removeprefix("TOKENLOOM_").lower() for key in kubernetes_start(service(cluster, name), cluster).env if "TOKENLOOM_" in key}
    assert given
    assert given <= set(type(config).model_fields)


@pytest.mark.parametrize("name", SERVICES)
def test_declared_ports_are_the_ones_that_a_service_listens_on(monkeypatch, rendered, name):
    cluster = rendered("cpu")
    config, ports = config_of(monkeypatch, cluster, name), service(cluster, name).ports
    if name == "gateway":
        assert (config.host, ports) == ("0.0.0.0", {"http": config.port})
    else:
        host, _, port = config.listen.rpartition(":")
        assert (host, config.metrics_host) == ("0.0.0.0", "0.0.0.0")
        assert ports == {"grpc": int(port), "metrics": config.metrics_port}


@pytest.mark.parametrize("name", ["tokenizer", "scheduler", "worker"])
def test_probes_ask_readiness_and_life_by_the_names_that_the_services_answer_to(rendered, name):
    container = service(rendered("cpu"), name)
    assert "service" not in container.probes["readinessProbe"]["grpc"]  # empty: readiness
    assert container.probes["livenessProbe"]["grpc"]["service"] == LIVE
    assert {probe["grpc"]["port"] for probe in container.probes.values()} == {container.ports["grpc"]}


def test_a_gateway_is_asked_whether_it_lives_and_whether_it_is_ready_where_its_image_asks(rendered):
    paths = {kind: probe["httpGet"]["path"] for kind, probe in service(rendered("cpu"), "gateway").probes.items()}
    assert paths == {"startupProbe": "/health", "readinessProbe": stage("gateway").healthcheck[-1], "livenessProbe": "/health"}


def test_who_registers_gives_the_port_that_it_listens_on_at_its_pods_address(monkeypatch, rendered):
    cluster = rendered("cpu")
    registering = [name for name in SERVICES if "advertise_address" in CONFIGS[name].model_fields]
    assert {"scheduler", "worker"} <= set(registering)
    for name in registering:
        config = config_of(monkeypatch, cluster, name)
        assert config.advertise_address == f"10.1.2.3:{config.listen.rpartition(':')[2]}"


def test_whoever_can_use_the_store_is_given_the_one_of_the_mesh(monkeypatch, rendered):
    cluster = rendered("cpu")
    using = [name for name in SERVICES if "store" in CONFIGS[name].model_fields]
    assert {config_of(monkeypatch, cluster, name).store for name in using} == {"redis://redis:6379/0"}
    assert {"scheduler", "worker"} <= set(using)
    assert {compose_start(name).env.get("TOKENLOOM_STORE") for name in using} == {"redis://redis:6379/0"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_pod_is_not_killed_before_it_could_drain(monkeypatch, rendered, name):
    cluster = rendered("cpu")
    config = config_of(monkeypatch, cluster, name)
    drain = getattr(config, "drain_delay", 0.0) + getattr(config, "drain_timeout", LAST_STEP)
    needed = pre_stop_seconds(service(cluster, name)) + drain + MARGIN
    assert needed <= grace_seconds(cluster.workload(name)) <= needed + 30


def test_gateways_keep_streams_for_longer_than_a_scheduler_may_take_to_end_and_start(monkeypatch, rendered):
    """Recreate: the next one starts when the old one is gone, after its drain or by SIGKILL."""
    cluster = rendered("cpu")
    assert config_of(monkeypatch, cluster, "gateway").resume_timeout >= grace_seconds(cluster.workload("scheduler")) + MARGIN


def test_an_import_is_given_up_by_the_exit_code_of_a_model_that_cannot_be_served(rendered, tmp_path):
    (rule,) = [rule for rule in rendered("cpu").workload("model-import").spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    (tmp_path / "broken").mkdir()
    assert rule["onExitCodes"]["values"] == [model_command.main("broken", to=tmp_path / "served", models=tmp_path)]


def test_envoy_is_not_killed_before_it_could_drain_and_drains_as_long_as_the_gateways(monkeypatch, rendered):
    cluster = rendered("cpu")
    script = (ROOT / "deploy/envoy/envoy.sh").read_text()
    defaults = dict(re.findall(r"\$\{(ENVOY_DRAIN_\w+):-(\d+)\}", script))
    given = kubernetes_start(service(cluster, "envoy"), cluster).env
    drain = {name: float(value) for name, value in (defaults | given).items() if name in defaults}
    assert set(drain) == {"ENVOY_DRAIN_DELAY", "ENVOY_DRAIN_TIMEOUT"}
    assert pre_stop_seconds(service(cluster, "envoy")) + sum(drain.values()) + MARGIN <= grace_seconds(cluster.workload("envoy"))
    assert drain["ENVOY_DRAIN_TIMEOUT"] >= config_of(monkeypatch, cluster, "gateway").drain_timeout


@pytest.mark.parametrize("name", ["gateway", "tokenizer"])
def test_who_is_found_by_dns_serves_until_dns_has_told_of_its_successor(rendered, name):
    cluster = rendered("cpu")
    assert pre_stop_seconds(service(cluster, name)) > DNS_SECONDS
    assert cluster.workload(name).spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_startup_waits_for_a_model_longer_than_anything_else(rendered):
    cluster = rendered("cpu")
    patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name in SERVICES
                for probe in [service(cluster, name).probes["startupProbe"]]}  # fmt: skip
    assert patience["worker"] >= 1800
    assert patience["scheduler"] >= patience["worker"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_manifest_starts_what_the_image_would_with_what_the_image_says(rendered, name):
    cluster = rendered("cpu")
    image, start = stage(name), kubernetes_start(service(cluster, name), cluster)
    assert start.command == image.entrypoint
    assert {key: value for key, value in image.env.items() if key in start.env} == {
        key: start.env[key] for key in image.env if key in start.env
    }


@pytest.mark.parametrize("name", SERVICES)
def test_what_compose_and_kubernetes_both_set_they_set_alike(rendered, name):
    cluster = rendered("cpu", "tracing")
    kubernetes, compose = kubernetes_start(service(cluster, name), cluster).env, compose_start(name).env
    both = set(kubernetes) & set(compose)
    assert both
    assert {key: kubernetes[key] for key in both} == {key: compose[key] for key in both}


def test_redis_envoy_and_the_collector_run_the_same_image_with_the_same_arguments_in_compose(rendered):
    cluster, compose = rendered("cpu", "tracing"), compose_services()
    for name in ("redis", "envoy", "otel-collector"):
        container, described = service(cluster, name), compose[name]
        assert container.raw["image"] == described["image"]
        assert container.command == [*described.get("entrypoint", []), *described["command"]]


def test_our_images_have_the_projects_version_and_run_as_the_images_user(rendered):
    cluster = rendered("cpu")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container.raw["image"] for container in cluster.containers if container.raw["image"].startswith("tokenloom/")}
    assert images == {f"tokenloom/{name}:{version}" for name in (*SERVICES, "models")}
    (user,) = set(re.findall(r"^USER (\d+):\1$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE))
    assert {workload.pod["securityContext"]["runAsUser"] for workload in cluster.workloads} == {int(user)}


def test_configuration_is_the_file_that_compose_mounts(rendered):
    cluster = rendered("cpu", "tracing")
    for name, files in {"envoy": ["envoy/envoy.yaml", "envoy/envoy.sh"], "otel-collector": ["otel/collector.yaml"]}.items():
        (volume,) = [volume for volume in cluster.workload(name).pod["volumes"] if "configMap" in volume]
        data = cluster.find("ConfigMap", volume["configMap"]["name"]).raw["data"]
        assert data == {path.partition("/")[2]: (ROOT / "deploy" / path).read_text() for path in files}


def test_envoys_declared_ports_are_its_listeners(rendered):
    listeners = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())["static_resources"]["listeners"]
    assert set(service(rendered("cpu"), "envoy").ports.values()) == {
        listener["address"]["socket_address"]["port_value"] for listener in listeners
    }


def test_the_import_writes_where_the_services_read_and_its_command_is_one_that_tokenloom_takes(monkeypatch, rendered):
    cluster = rendered("cpu")
    start, seen = kubernetes_start(service(cluster, "model-import"), cluster), {}

    class Module:
        @staticmethod
        def main(model, *, to, models):
            seen.update(model=model, to=str(to), models=str(models))
            return 0

    monkeypatch.setattr(command_line, "_module", lambda name: Module)
    program, *arguments = start.command
    assert program == "tokenloom"
    assert CliRunner().invoke(command_line.app, arguments, env=start.env).exit_code == 0
    assert seen == {"model": "", "to": "/models/served", "models": "/models/local"}
    for name in ("tokenizer", "worker"):
        for container in cluster.workload(name).containers:
            assert kubernetes_start(container, cluster).env["TOKENLOOM_MODEL"] == seen["to"]
            assert any(mount["mountPath"] == "/models" and mount["readOnly"] for mount in container.mounts)


def test_compose_mounts_the_volume_that_the_import_fills_where_the_services_read(rendered):
    services, there = compose_services(), str(Path(stage("worker").env["TOKENLOOM_MODEL"]).parent)
    assert f"model:{there}" in services["model"]["volumes"]
    assert all(f"model:{there}:ro" in services[name]["volumes"] for name in ("tokenizer", "worker"))
    assert stage("models").cmd == service(rendered("cpu"), "model-import").command[1:]


def test_clients_ask_for_the_packaged_model_by_its_own_name(monkeypatch, rendered):
    assert config_of(monkeypatch, rendered("cpu"), "gateway").served_model_name == [DEFAULT_MODEL.name]


def test_limits_of_memory_leave_room_for_what_the_settings_allow(monkeypatch, rendered):
    for overlay in ("cpu", "minimal"):
        cluster = rendered(overlay)
        tokenizer = config_of(monkeypatch, cluster, "tokenizer")
        limit = quantities.parse(service(cluster, "tokenizer").resource("limits", "memory"))
        allowed = tokenizer.tokenizer_pool_size * tokenizer.tokenizer_memory_bytes
        assert limit > allowed
        assert int(compose_services()["tokenizer"]["mem_limit"].removesuffix("g")) << 30 > allowed
        redis = service(cluster, "redis")
        most = int(redis.command[redis.command.index("--maxmemory") + 1].removesuffix("mb")) << 20
        assert quantities.parse(redis.resource("limits", "memory")) >= 2 * most


def test_monitors_ask_where_prometheus_asks_in_compose_and_leave_out_the_same(rendered):
    cluster = rendered("cpu", "monitoring")
    jobs = {job["job_name"]: job for job in yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]}
    monitors = {monitor.name: monitor for monitor in cluster.of("PodMonitor")}
    assert set(monitors) == {*SERVICES, "envoy"}
    for name, monitor in monitors.items():
        assert monitor.spec["jobLabel"] == "app.kubernetes.io/name"
        (endpoint,), (found,) = monitor.spec["podMetricsEndpoints"], jobs[name]["dns_sd_configs"]
        assert cluster.workload(name).port(endpoint["port"]) == found["port"]
        assert endpoint["path"] == jobs[name].get("metrics_path", "/metrics")
        (ours,), (theirs,) = endpoint["metricRelabelings"], jobs[name]["metric_relabel_configs"]
        assert (ours["sourceLabels"], ours["regex"], ours["action"]) == (theirs["source_labels"], theirs["regex"], theirs["action"])


def test_the_operators_rules_are_those_of_prometheus(rendered):
    assert prometheus_rule.render(prometheus_rule.RULES.read_text()) == prometheus_rule.TARGET.read_text()
    groups = yaml.safe_load(prometheus_rule.RULES.read_text())["groups"]
    assert rendered("cpu", "monitoring").find("PrometheusRule", "tokenloom").spec["groups"] == groups


def test_measures_of_the_autoscalers_are_offered_by_the_adapters_rules_from_metrics_that_exist(rendered):
    rules = yaml.safe_load((ROOT / "k8s/components/autoscaling-by-load/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    wanted = {
        metric["pods"]["metric"]["name"]
        for scaler in rendered("cpu", "autoscaling-by-load").of("HorizontalPodAutoscaler")
        for metric in scaler.spec["metrics"]
        if metric["type"] == "Pods"
    }
    assert {rule["name"]["as"] for rule in rules} == wanted
    documented = set(re.findall(r"^\| `(tokenloom:\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    for rule in rules:
        assert set(re.findall(r"tokenloom:\w+", rule["seriesQuery"] + rule["metricsQuery"])) <= documented


def test_autoscalers_by_load_keep_the_cpu(rendered):
    plain, loaded = rendered("cpu"), rendered("cpu", "autoscaling-by-load")
    for scaler in plain.of("HorizontalPodAutoscaler"):
        (cpu,) = scaler.spec["metrics"]
        assert cpu in loaded.find("HorizontalPodAutoscaler", scaler.name).spec["metrics"]


def test_the_page_of_bounds_has_the_grace_of_every_pod(rendered):
    (row,) = [line for line in (ROOT / "docs/bounds.md").read_text().splitlines() if line.startswith("| end of a pod")]
    said = {
        name.lower(): int(number)
        for names, number in re.findall(r"([A-Za-z]+(?: and [A-Za-z]+)?) (\d+)", row)
        for name in names.split(" and ")
    }
    graces = {workload.name: grace_seconds(workload) for workload in rendered("cpu").workloads if workload.kind != "Job"}
    assert {name: said.get(name) for name in graces} == graces


def test_the_page_names_every_overlay_and_component():
    page = (ROOT / "docs/kubernetes.md").read_text()
    names = [f"k8s/overlays/{path.name}" for path in (ROOT / "k8s/overlays").iterdir()]
    names += [f"k8s/components/{name}" for name in components()]
    assert not [name for name in names if f"`{name}`" not in page]


def test_a_variant_is_named_as_a_user_would_put_it_together():
    assert str(Variant("cpu", ("monitoring", "tracing"))) == "cpu + monitoring + tracing"
