"""The rules for what the API server refuses beyond its schema, and for what bites when nodes are emptied, volumes are shared, pods wait."""

from __future__ import annotations

import copy

import pytest

from tests.unit.k8s.test_rules import container, pod, spec, variable
from tools.k8s_check import admission, operation
from tools.k8s_check.manifests import Cluster
from tools.k8s_check.rules import RULES, check

OURS = [rule for rule in RULES if rule.__module__ in (admission.__name__, operation.__name__)]


def again(cluster, kind, name):
    """A second one like it."""
    raw = copy.deepcopy(cluster.find(kind, name).raw)
    raw["metadata"]["name"] = "again"
    cluster.manifests.append(Cluster([raw]).manifests[0])


def of_the_model(cluster, kind, name):
    return next(mount for mount in container(cluster, kind, name)["volumeMounts"] if mount["name"] == "models")


def unhashed(cluster):
    (volume,) = [volume for volume in pod(cluster, "Deployment", "envoy")["volumes"] if "configMap" in volume]
    cluster.find("ConfigMap", volume["configMap"]["name"]).raw["metadata"]["name"] = volume["configMap"]["name"] = "envoy"


def least_available(cluster, number):
    budget = spec(cluster, "PodDisruptionBudget", "gateway")
    del budget["maxUnavailable"]
    budget["minAvailable"] = number


BROKEN = {
    "a job that starts again and again": (
        lambda c: pod(c, "Job", "model-import").update(restartPolicy="Always"),
        "restartPolicy Always is not for a Job",
    ),
    "failures that nobody judges": (
        lambda c: pod(c, "Job", "model-import").update(restartPolicy="OnFailure"),
        "podFailurePolicy needs restartPolicy Never",
    ),
    "a service that ends": (
        lambda c: pod(c, "Deployment", "gateway").update(restartPolicy="Never"),
        "restartPolicy Never is not for a Deployment",
    ),
    "two strategies": (lambda c: spec(c, "Deployment", "scheduler")["strategy"].update(rollingUpdate={"maxSurge": 1}), "beside it"),
    "an update that cannot begin": (
        lambda c: spec(c, "Deployment", "gateway")["strategy"]["rollingUpdate"].update(maxSurge="0%"),
        "maxSurge and maxUnavailable are both 0",
    ),
    "a name of no DNS": (lambda c: container(c, "Deployment", "gateway").update(name="Gate_way"), "its name is no DNS label"),
    "a variable from two places": (
        lambda c: variable(c, "Deployment", "gateway", "POD_NAME").update(value="me"),
        "POD_NAME has both value and valueFrom",
    ),
    "one path, two volumes": (
        lambda c: container(c, "Deployment", "envoy")["volumeMounts"][1].update(mountPath="/etc/envoy"),
        "mounts two volumes at /etc/envoy",
    ),
    "two ports of a name": (
        lambda c: container(c, "Deployment", "scheduler")["ports"].append({"name": "grpc", "containerPort": 1}),
        "two of its ports are called grpc",
    ),
    "a probe that asks twice": (
        lambda c: container(c, "Deployment", "gateway")["livenessProbe"].update(tcpSocket={"port": "http"}),
        "livenessProbe must ask in one way",
    ),
    "life that must be seen twice": (
        lambda c: container(c, "Deployment", "gateway")["livenessProbe"].update(successThreshold=2),
        "livenessProbe: successThreshold must be 1",
    ),
    "killed in its preStop": (
        lambda c: pod(c, "Deployment", "gateway").update(terminationGracePeriodSeconds=35),
        "SIGKILL comes before SIGTERM",
    ),
    "a budget of nobody": (lambda c: spec(c, "PodDisruptionBudget", "gateway").update(maxUnavailable=0), "can never be emptied"),
    "a budget of an autoscaler's fewest": (lambda c: least_available(c, 2), "lets no pod of Deployment/gateway go when it has its fewest"),
    "two budgets": (lambda c: again(c, "PodDisruptionBudget", "gateway"), "has several PodDisruptionBudgets (gateway, again)"),
    "killed for waiting": (
        lambda c: container(c, "StatefulSet", "worker")["livenessProbe"]["grpc"].pop("service"),
        "livenessProbe asks what readinessProbe asks",
    ),
    "killed for a moment": (
        lambda c: container(c, "StatefulSet", "worker")["livenessProbe"].update(failureThreshold=1),
        "kills after less than 15 s",
    ),
    "one node's volume on two": (
        lambda c: spec(c, "PersistentVolumeClaim", "models").update(accessModes=["ReadWriteOnce"]),
        "StatefulSet/worker: mounts PersistentVolumeClaim/models, which one node can, and may be put on another",
    ),
    "a service that writes the model": (
        lambda c: of_the_model(c, "StatefulSet", "worker").pop("readOnly"),
        "is written to by StatefulSet/worker, Job/model-import",
    ),
    "an import that may not write": (
        lambda c: of_the_model(c, "Job", "model-import").update(readOnly=True),
        "is mounted read-only by all",
    ),
    "a key in the open": (
        lambda c: container(c, "Deployment", "gateway")["env"].append({"name": "TOKENLOOM_API_KEY", "value": "sk-1"}),
        "TOKENLOOM_API_KEY is confidential",
    ),
    "a password in an address": (
        lambda c: variable(c, "Deployment", "scheduler", "TOKENLOOM_STORE").update(value="redis://:word@redis:6379/0"),
        "TOKENLOOM_STORE is confidential",
    ),
    "a store for everybody": (lambda c: spec(c, "Service", "redis").update(type="LoadBalancer"), "is reached from outside the cluster"),
    "updates that wait": (
        lambda c: spec(c, "StatefulSet", "worker").update(updateStrategy={"type": "OnDelete"}),
        "updateStrategy OnDelete",
    ),
    "configuration that never arrives": (unhashed, "takes ConfigMap envoy, whose name has no hash"),
    "two autoscalers": (lambda c: again(c, "HorizontalPodAutoscaler", "gateway"), "scales gateway, which HorizontalPodAutoscaler/gateway"),
    "an autoscaler by nothing": (lambda c: spec(c, "HorizontalPodAutoscaler", "gateway").update(metrics=[]), "measures nothing"),
}


def broken(rendered, breaks):
    cluster = rendered("cpu")
    breaks(cluster)
    return Cluster([manifest.raw for manifest in cluster.manifests])


@pytest.mark.parametrize(("breaks", "said"), BROKEN.values(), ids=list(BROKEN))
def test_what_would_bite_is_found(rendered, breaks, said):
    findings = [str(finding) for finding in check(broken(rendered, breaks))]
    assert [finding for finding in findings if said in finding], findings


def test_every_rule_has_been_seen_to_fail(rendered):
    clusters = [broken(rendered, breaks) for breaks, _ in BROKEN.values()]
    assert {rule.__name__ for rule in OURS if any(list(rule(cluster)) for cluster in clusters)} == {rule.__name__ for rule in OURS}


def test_who_mounts_a_volume_of_one_node_is_put_beside_the_others(rendered):
    cluster = rendered("cpu", "model-on-one-node")
    assert cluster.find("PersistentVolumeClaim", "models").spec["accessModes"] == ["ReadWriteOnce"]
    assert not list(operation.check_claims(cluster))
    del pod(cluster, "Job", "model-import")["affinity"]
    assert [finding.where for finding in operation.check_claims(cluster)] == ["Job/model-import"]


def test_the_one_scheduler_is_replaced_soon_when_its_machine_is_gone(rendered):
    patience = {item["key"]: item["tolerationSeconds"] for item in rendered("cpu").workload("scheduler").pod["tolerations"]}
    assert set(patience) == {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"}
    assert max(patience.values()) <= 10
