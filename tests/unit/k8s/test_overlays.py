"""The overlays render, pass every rule, and are what their names say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tools.k8s_check import references
from tools.k8s_check.manifests import Cluster
from tools.k8s_check.quantities import parse
from tools.k8s_check.rendering import ROOT, kustomize, render, variants
from tools.k8s_check.rules import check

VARIANTS = list(variants())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_variant_has_nothing_wrong_and_explains_every_secret_that_it_needs(variant):
    cluster = Cluster.parse(render(variant))
    assert not check(cluster)
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert not [name for name in references.secrets(cluster) if not re.search(rf"secret generic {name}\b", page)]


def test_every_component_is_among_the_variants():
    assert {name for variant in VARIANTS for name in variant.components} | {"autoscaling"} == {
        path.parent.name for path in Path(ROOT, "k8s/components").glob("*/kustomization.yaml")
    }


def test_minimal_is_one_of_each_without_autoscalers_and_fits_a_laptop(rendered):
    cluster = rendered("minimal")
    assert not cluster.of("HorizontalPodAutoscaler")
    assert {workload.spec.get("replicas", 1) for workload in cluster.workloads} == {1}
    requests = {name: sum(parse(c.resource("requests", name)) for c in cluster.containers if not c.init) for name in ("cpu", "memory")}
    assert requests["cpu"] <= 2
    assert requests["memory"] <= parse("5Gi")


def test_a_model_on_several_nodes_is_on_a_volume_that_several_nodes_may_mount(rendered):
    modes = {name: rendered(name).find("PersistentVolumeClaim", "models").spec["accessModes"] for name in ("cpu", "gpu", "minimal")}
    assert modes == {"cpu": ["ReadWriteMany"], "gpu": ["ReadWriteMany"], "minimal": ["ReadWriteOnce"]}


def test_a_gpu_worker_asks_for_its_gpu_and_for_the_nodes_that_have_one(rendered):
    worker = rendered("gpu").workload("worker")
    assert worker.containers[-1].resource("limits", "nvidia.com/gpu") == "1"
    assert worker.pod["runtimeClassName"] == "nvidia"
    assert worker.pod["nodeSelector"]
    assert {toleration["key"] for toleration in worker.pod["tolerations"]} == {"nvidia.com/gpu"}


def test_an_external_redis_leaves_nothing_of_the_one_in_the_namespace(rendered):
    cluster = rendered("cpu", "external-redis")
    assert not [str(manifest) for manifest in cluster.manifests if manifest.name == "redis"]
    for name in ("gateway", "scheduler", "worker"):
        (store,) = [item for item in cluster.workload(name).containers[-1].env if item["name"] == "TOKENLOOM_STORE"]
        assert store == {"name": "TOKENLOOM_STORE", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}


def test_without_its_secret_a_gateway_with_api_keys_does_not_start(rendered):
    (item,) = [item for item in rendered("cpu", "api-keys").workload("gateway").containers[-1].env if item["name"] == "TOKENLOOM_API_KEY"]
    assert not item["valueFrom"]["secretKeyRef"].get("optional")


def test_keys_from_the_store_are_asked_for_where_there_is_a_store(rendered):
    for components in (("api-keys-from-store",), ("api-keys-from-store", "external-redis")):
        names = {item["name"]: item for item in rendered("cpu", *components).workload("gateway").containers[-1].env}
        assert names["TOKENLOOM_API_KEYS_FROM_STORE"]["value"] == "true"
        assert "TOKENLOOM_STORE" in names


def test_the_scheduler_is_one_and_never_two(rendered):
    for overlay in ("cpu", "gpu", "minimal"):
        scheduler = rendered(overlay).workload("scheduler")
        assert scheduler.spec["replicas"] == 1
        assert scheduler.spec["strategy"] == {"type": "Recreate"}


def test_a_scheduler_that_is_not_ready_yet_can_be_dialled_and_its_successor_has_the_same_address(rendered):
    service = rendered("minimal").find("Service", "scheduler")
    assert service.spec["publishNotReadyAddresses"] is True
    assert service.spec.get("clusterIP") != "None"


def test_what_is_balanced_by_its_clients_is_headless(rendered):
    cluster = rendered("minimal")
    headless = {service.name for service in cluster.of("Service") if service.spec.get("clusterIP") == "None"}
    assert headless == {"gateway", "tokenizer", "worker"}


def test_workers_start_side_by_side(rendered):
    assert rendered("cpu").find("StatefulSet", "worker").spec["podManagementPolicy"] == "Parallel"


def test_the_overlay_that_the_page_shows_renders_and_passes_every_rule(tmp_path):
    (shown,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
    base = os.path.relpath(ROOT / "k8s", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        shown.replace("../../components", f"{base}/components").replace("../cpu", f"{base}/overlays/cpu")
    )
    cluster = Cluster.parse(kustomize(tmp_path.resolve()))
    assert not check(cluster)
    assert cluster.find("Service", "envoy").spec["type"] == "LoadBalancer"
    assert {c.raw["image"] for c in cluster.workload("gateway").containers} == {"registry.example.com/tokenloom/gateway:0.1.0"}
