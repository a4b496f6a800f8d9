"""What the API server refuses although its schema lets it pass: fields that exclude each other, names, numbers that depend on others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from tools.k8s_check.manifests import Cluster, Container, Finding, Workload
from tools.k8s_check.pods import grace_seconds, pre_stop_seconds

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HANDLERS = {"exec", "grpc", "httpGet", "tcpSocket"}


def check_admission(cluster: Cluster) -> Iterator[Finding]:
    """Workloads and containers would be taken."""
    for workload in cluster.workloads:
        yield from _check_update(workload)
        for container in workload.containers:
            yield from _check_container(container)


def _check_update(workload: Workload) -> Iterator[Finding]:
    restart = workload.pod.get("restartPolicy", "Always")
    if (restart == "Always") is (workload.kind == "Job"):
        yield workload.wrong(f"restartPolicy {restart} is not for a {workload.kind}")
    if "podFailurePolicy" in workload.spec and restart != "Never":
        yield workload.wrong("podFailurePolicy needs restartPolicy Never")
    strategy = workload.spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    if rolling and strategy.get("type") == "Recreate":
        yield workload.wrong("strategy Recreate has rollingUpdate beside it")
    if all(str(rolling.get(field, "25%")) in ("0", "0%") for field in ("maxSurge", "maxUnavailable")):
        yield workload.wrong("maxSurge and maxUnavailable are both 0: no update could begin")


def _check_container(container: Container) -> Iterator[Finding]:
    if not _NAME.fullmatch(container.name):
        yield container.wrong("its name is no DNS label")
    for item in container.env:
        if "value" in item and "valueFrom" in item:
            yield container.wrong(f"{item['name']} has both value and valueFrom")
    paths = Counter(mount["mountPath"] for mount in container.mounts)
    yield from (container.wrong(f"mounts two volumes at {path}") for path, count in paths.items() if count > 1)
    ports = Counter(port.get("name") for port in container.raw.get("ports") or [])
    yield from (container.wrong(f"two of its ports are called {name}") for name, count in ports.items() if name and count > 1)
    for kind, probe in container.probes.items():
        if len(_HANDLERS & set(probe)) != 1:
            yield container.wrong(f"{kind} must ask in one way")
        if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            yield container.wrong(f"{kind}: successThreshold must be 1")
    if pre_stop_seconds(container) >= grace_seconds(container.workload):
        yield container.wrong("its preStop sleeps for the whole of terminationGracePeriodSeconds: SIGKILL comes before SIGTERM")
