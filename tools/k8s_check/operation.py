"""What the cluster takes and what bites later: a node that cannot be emptied, a probe that kills who only waits, a volume elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check.manifests import Cluster, Container, Finding, Manifest, Workload, matches

_HANDLERS = ("exec", "grpc", "httpGet", "tcpSocket")
# The least patience, in seconds, before a container that does not answer is killed: a busy machine is not a dead one.
_LEAST_PATIENCE = 15
_CONFIDENTIAL = re.compile(r"(KEY|KEYS|TOKEN|PASSWORD|SECRET)$")
_CREDENTIALS = re.compile(r"://[^/\s@]*:[^/\s@]+@")
# What kustomize appends to the name of a generated ConfigMap.
_HASHED = re.compile(r"-[0-9a-z]{10}$")
# The one way in from outside the cluster.
_EDGE = "envoy"
_SHARED = {"ReadWriteMany", "ReadOnlyMany"}


def check_budgets(cluster: Cluster) -> Iterator[Finding]:
    """A node can be emptied: each budget lets a pod go, and no pod has two of them, which the eviction API refuses."""
    budgets = cluster.of("PodDisruptionBudget")
    for budget in budgets:
        if str(budget.spec.get("maxUnavailable", 1)) in ("0", "0%"):
            yield budget.wrong("lets no pod go: its node can never be emptied")
        for workload in cluster.selected(budget.spec.get("selector") or {}):
            least = str(budget.spec.get("minAvailable", 0))
            if least == "100%" or (least.isdigit() and int(least) >= _fewest(workload, cluster)):
                yield budget.wrong(f"lets no pod of {workload} go when it has its fewest")
    for workload in cluster.workloads:
        own = [budget.name for budget in budgets if matches(budget.spec.get("selector") or {}, workload.pod_labels)]
        if len(own) > 1:
            yield workload.wrong(f"has several PodDisruptionBudgets ({', '.join(own)}): evictions are refused")


def _fewest(workload: Workload, cluster: Cluster) -> int:
    """Its replicas when it has the fewest: by its number, or its autoscaler's least."""
    targets = [scaler for scaler in cluster.of("HorizontalPodAutoscaler") if scaler.spec["scaleTargetRef"]["name"] == workload.name]
    return int(targets[0].spec.get("minReplicas", 1)) if targets else int(workload.spec.get("replicas", 1))


def check_liveness(cluster: Cluster) -> Iterator[Finding]:
    """Nobody is killed for waiting: life is another question than readiness, and asked patiently."""
    for container in cluster.containers:
        live = container.probes.get("livenessProbe")
        if live is None:
            continue
        ready = container.probes.get("readinessProbe", {})
        if any(name in live and live[name] == ready.get(name) for name in _HANDLERS):
            yield container.wrong("livenessProbe asks what readinessProbe asks: who only waits for another would be killed")
        if live.get("periodSeconds", 10) * live.get("failureThreshold", 3) < _LEAST_PATIENCE:
            yield container.wrong(f"livenessProbe kills after less than {_LEAST_PATIENCE} s without an answer")


def check_claims(cluster: Cluster) -> Iterator[Finding]:
    """A volume for one node is mounted on one node, and one workload alone writes to it."""
    for claim in cluster.of("PersistentVolumeClaim"):
        users = [workload for workload in cluster.workloads if claim.name in _claims(workload).values()]
        writers = [str(workload) for workload in users if any(_writes(container, claim.name) for container in workload.containers)]
        if len(writers) > 1:
            yield claim.wrong(f"is written to by {', '.join(writers)}")
        if users and not writers:
            yield claim.wrong("is mounted read-only by all: nobody can fill it")
        if not _SHARED & set(claim.spec.get("accessModes") or []) and (len(users) > 1 or any(user.several for user in users)):
            apart = [user for user in users if not all(_beside(user, other) for other in users)]
            yield from (user.wrong(f"mounts {claim}, which one node can, and may be put on another") for user in apart)


def _claims(workload: Workload) -> dict[str, str]:
    """Claims by the names of its volumes."""
    volumes = workload.pod.get("volumes") or []
    return {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}


def _writes(container: Container, claim: str) -> bool:
    volumes = _claims(container.workload)
    return any(volumes.get(mount["name"]) == claim and not mount.get("readOnly") for mount in container.mounts)


def _beside(workload: Workload, other: Workload) -> bool:
    """Whether its pods are only put on a machine that has the other's."""
    affinity: Mapping[str, Any] = (workload.pod.get("affinity") or {}).get("podAffinity") or {}
    return any(
        term["topologyKey"] == "kubernetes.io/hostname" and matches(term.get("labelSelector") or {}, other.pod_labels)
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    )


def check_secrecy(cluster: Cluster) -> Iterator[Finding]:
    """No key or password stands in a manifest, and nobody but the edge is reached from outside."""
    for container in cluster.containers:
        for name, value in container.values.items():
            if value and (_CONFIDENTIAL.search(name) or _CREDENTIALS.search(value)):
                yield container.wrong(f"{name} is confidential and stands in the manifest: take it from a Secret")
    yield from (secret.wrong("a Secret stands in the manifests") for secret in cluster.of("Secret"))
    for service in cluster.of("Service"):
        if service.name != _EDGE and (service.spec.get("type", "ClusterIP") != "ClusterIP" or service.spec.get("externalIPs")):
            yield service.wrong("is reached from outside the cluster")


def check_rollout(cluster: Cluster) -> Iterator[Finding]:
    """What is applied comes to the pods: changed configuration by its name, a new template by itself; one autoscaler decides a number."""
    for workload in cluster.workloads:
        if (workload.spec.get("updateStrategy") or {}).get("type") == "OnDelete":
            yield workload.wrong("updateStrategy OnDelete: what is applied would wait for somebody who deletes pods")
        for name in sorted(_configuration(workload)):
            if not _HASHED.search(name):
                yield workload.wrong(f"takes ConfigMap {name}, whose name has no hash: a change would not reach its pods")
    targets: dict[str, Manifest] = {}
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        target = scaler.spec["scaleTargetRef"]["name"]
        if target in targets:
            yield scaler.wrong(f"scales {target}, which {targets[target]} scales too")
        targets[target] = scaler
        if not scaler.spec.get("metrics"):
            yield scaler.wrong("measures nothing")


def _configuration(workload: Workload) -> set[str]:
    """ConfigMaps that its pods take from."""
    volumes = {volume["configMap"]["name"] for volume in workload.pod.get("volumes") or [] if "configMap" in volume}
    sources = [(item.get("valueFrom") or {}).get("configMapKeyRef") for container in workload.containers for item in container.env]
    return volumes | {source["name"] for source in sources if source}
