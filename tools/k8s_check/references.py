"""Whatever a manifest names is there: pods by their labels, ports, volumes, configuration, accounts, autoscalers' targets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check.manifests import Cluster, Container, Finding, Manifest, Workload, matches

_VARIABLE = re.compile(r"\$\((\w+)\)")


def check_names(cluster: Cluster) -> Iterator[Finding]:
    """Every object once, all in one namespace, which is among them."""
    counts = Counter((str(manifest), manifest.namespace) for manifest in cluster.manifests)
    yield from (Finding(where, "is defined twice") for (where, _), count in counts.items() if count > 1)
    namespaces = {manifest.name for manifest in cluster.of("Namespace")}
    for manifest in cluster.manifests:
        if manifest.kind != "Namespace" and manifest.namespace not in namespaces:
            yield manifest.wrong(f"is in the namespace {manifest.namespace or '(none)'}, which is not in the manifests")


def check_selectors(cluster: Cluster) -> Iterator[Finding]:
    """Workloads select their own pods; Services, budgets, policies and monitors select some."""
    for workload in cluster.workloads:
        selector = workload.spec.get("selector")
        if selector is not None and not matches(selector, workload.pod_labels):
            yield workload.wrong("its selector does not take its own pods")
        others = [other for other in cluster.workloads if other is not workload and selector and matches(selector, other.pod_labels)]
        yield from (workload.wrong(f"its selector takes the pods of {other}, too") for other in others)
    for service in cluster.of("Service"):
        if service.spec.get("selector") and not _behind(service, cluster):
            yield service.wrong("its selector takes no pods")
    for manifest in cluster.of("PodDisruptionBudget", "PodMonitor"):
        if not cluster.selected(manifest.spec.get("selector") or {}):
            yield manifest.wrong("its selector takes no pods")


def _behind(service: Manifest, cluster: Cluster) -> list[Workload]:
    return cluster.selected({"matchLabels": service.spec.get("selector")}) if service.spec.get("selector") else []


def check_services(cluster: Cluster) -> Iterator[Finding]:
    """A Service's ports are declared by the pods behind it; a StatefulSet's Service exists."""
    for service in cluster.of("Service"):
        for port in service.spec.get("ports") or []:
            target = port.get("targetPort", port["port"])
            for workload in _behind(service, cluster):
                number = workload.port(target)
                if number is None:
                    yield service.wrong(f"targetPort {target} is not declared by {workload}")
                elif service.spec.get("clusterIP") == "None" and number != port["port"]:
                    # A headless name leads to the pods themselves: nothing translates the port.
                    yield service.wrong(f"is headless: port {port['port']} must be the pods' own, {number}")
    for workload in cluster.workloads:
        name = workload.spec.get("serviceName")
        if name is not None and cluster.find("Service", name) is None:
            yield workload.wrong(f"serviceName {name} is not in the manifests")


def check_autoscalers(cluster: Cluster) -> Iterator[Finding]:
    """An autoscaler's target exists, asks for the resource that is measured, and has no number of its own that would undo the scaling."""
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        reference = scaler.spec["scaleTargetRef"]
        target = cluster.find(reference["kind"], reference["name"])
        if not isinstance(target, Workload) or target.raw["apiVersion"] != reference.get("apiVersion"):
            yield scaler.wrong(f"scaleTargetRef {reference['kind']}/{reference['name']} is not in the manifests")
            continue
        if "replicas" in target.spec:
            yield target.wrong("has a number of replicas and an autoscaler: each apply would undo the scaling")
        if scaler.spec.get("minReplicas", 1) > scaler.spec["maxReplicas"]:
            yield scaler.wrong("minReplicas is more than maxReplicas")
        measured = [metric["resource"]["name"] for metric in scaler.spec.get("metrics") or [] if metric["type"] == "Resource"]
        for name in measured:
            if any(container.resource("requests", name) is None for container in target.containers if not container.init):
                yield scaler.wrong(f"measures {name}, which {target} does not request")


def check_volumes(cluster: Cluster) -> Iterator[Finding]:
    """Mounts name volumes, volumes name what exists, and each is mounted somewhere."""
    for workload in cluster.workloads:
        volumes = {volume["name"]: volume for volume in workload.pod.get("volumes") or []}
        known = set(volumes) | {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates") or []}
        mounted = set()
        for container in workload.containers:
            mounted |= {mount["name"] for mount in container.mounts}
            for name in sorted({mount["name"] for mount in container.mounts} - known):
                yield container.wrong(f"mounts the volume {name}, which does not exist")
        yield from (workload.wrong(f"volume {name} is mounted nowhere") for name in sorted(known - mounted))
        for name, volume in volumes.items():
            yield from _check_volume(cluster, workload, name, volume)


def _check_volume(cluster: Cluster, workload: Workload, name: str, volume: Mapping[str, Any]) -> Iterator[Finding]:
    for source, field, kind in (
        ("configMap", "name", "ConfigMap"),
        ("secret", "secretName", "Secret"),
        ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
    ):
        if source not in volume or volume[source].get("optional"):
            continue
        found = cluster.find(kind, volume[source][field])
        if found is None and kind != "Secret":
            yield workload.wrong(f"volume {name} names {kind} {volume[source][field]}, which is not in the manifests")
        for item in volume[source].get("items") or []:
            if found is not None and item["key"] not in (found.raw.get("data") or {}):
                yield workload.wrong(f"volume {name} names key {item['key']}, which {found} does not have")


def check_environment(cluster: Cluster) -> Iterator[Finding]:
    """Variables stand once, refer to earlier ones (later ones are not replaced), and to keys that exist."""
    for container in cluster.containers:
        seen: set[str] = set()
        for item in container.env:
            if item["name"] in seen:
                yield container.wrong(f"{item['name']} is set twice")
            for name in _VARIABLE.findall(item.get("value") or ""):
                if name not in seen:
                    yield container.wrong(f"{item['name']} refers to {name}, which does not stand before it")
            seen.add(item["name"])
            yield from _check_source(cluster, container, item)
        for name in (name for word in container.command for name in _VARIABLE.findall(word)):
            if name not in seen:
                yield container.wrong(f"its command refers to {name}, which is not set")


def _check_source(cluster: Cluster, container: Container, item: Mapping[str, Any]) -> Iterator[Finding]:
    reference = (item.get("valueFrom") or {}).get("configMapKeyRef")
    if reference is None or reference.get("optional"):
        return
    found = cluster.find("ConfigMap", reference["name"])
    if found is None:
        yield container.wrong(f"{item['name']} names ConfigMap {reference['name']}, which is not in the manifests")
    elif reference["key"] not in (found.raw.get("data") or {}):
        yield container.wrong(f"{item['name']} names key {reference['key']}, which {found} does not have")


def secrets(cluster: Cluster) -> set[str]:
    """Names of the Secrets that pods take from; none stands in the manifests, so each must be explained where users read."""
    sources = [item.get("valueFrom", {}).get("secretKeyRef") for container in cluster.containers for item in container.env]
    volumes = [volume.get("secret") for workload in cluster.workloads for volume in workload.pod.get("volumes") or []]
    return {source["name"] for source in sources if source} | {volume["secretName"] for volume in volumes if volume}
