"""What every pod must say of itself: who it is, what it may do, what it needs, how one asks it how it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check import quantities
from tools.k8s_check.manifests import Cluster, Container, Finding, Workload, matches

# What the Pod Security Standard `restricted` lets a pod mount.
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def check_identity(cluster: Cluster) -> Iterator[Finding]:
    """An account of its own without a token, and none of the variables that Kubernetes adds unasked."""
    for workload in cluster.workloads:
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield workload.wrong("automountServiceAccountToken is not false")
        if workload.pod.get("enableServiceLinks") is not False:
            yield workload.wrong("enableServiceLinks is not false")
        account = workload.pod.get("serviceAccountName", "default")
        found = cluster.find("ServiceAccount", account)
        if found is None:
            yield workload.wrong(f"serviceAccountName {account} is not in the manifests")
        elif found.raw.get("automountServiceAccountToken") is not False:
            yield found.wrong("automountServiceAccountToken is not false")


def check_restricted(cluster: Cluster) -> Iterator[Finding]:
    """The Pod Security Standard `restricted`, as the namespace enforces it, and a read-only root file system on top."""
    for namespace in cluster.of("Namespace"):
        if namespace.labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield namespace.wrong("does not enforce the Pod Security Standard `restricted`")
    for workload in cluster.workloads:
        yield from (workload.wrong(f"{field} is set") for field in ("hostNetwork", "hostPID", "hostIPC") if workload.pod.get(field))
        for volume in workload.pod.get("volumes") or []:
            if refused := set(volume) - {"name"} - _VOLUMES:
                yield workload.wrong(f"volume {volume['name']} is of a kind that `restricted` refuses: {', '.join(sorted(refused))}")
        for container in workload.containers:
            yield from _check_confined(container, workload.pod.get("securityContext") or {})


def _check_confined(container: Container, pod: Mapping[str, Any]) -> Iterator[Finding]:
    own: Mapping[str, Any] = container.raw.get("securityContext") or {}
    both = {**pod, **own}
    capabilities = own.get("capabilities") or {}
    conditions = {
        "runAsNonRoot is not true": both.get("runAsNonRoot") is True,
        "runAsUser is not a number other than 0": isinstance(both.get("runAsUser"), int) and both["runAsUser"] > 0,
        "seccompProfile is not RuntimeDefault": (both.get("seccompProfile") or {}).get("type") == "RuntimeDefault",
        "allowPrivilegeEscalation is not false": own.get("allowPrivilegeEscalation") is False,
        "readOnlyRootFilesystem is not true": own.get("readOnlyRootFilesystem") is True,
        "it is privileged": not own.get("privileged"),
        "capabilities do not drop ALL": capabilities.get("drop") == ["ALL"],
        "capabilities are added": not capabilities.get("add"),
        "it has a hostPort": not any("hostPort" in port for port in container.raw.get("ports") or []),
    }
    yield from (container.wrong(problem) for problem, holds in conditions.items() if not holds)


def check_resources(cluster: Cluster) -> Iterator[Finding]:
    """Requests of CPU and memory, a limit of memory, none below its request, and devices whole."""
    for container in cluster.containers:
        for kind, name in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
            if container.resource(kind, name) is None:
                yield container.wrong(f"resources.{kind}.{name} is missing")
        names = {name for kind in ("requests", "limits") for name in (container.raw.get("resources") or {}).get(kind, {})}
        for name in sorted(names):
            yield from _check_resource(container, name)
    for claim in _claims(cluster):
        try:
            quantities.parse(str(claim["spec"]["resources"]["requests"]["storage"]))
        except ValueError as error:
            yield Finding(f"PersistentVolumeClaim/{claim['metadata']['name']}", f"storage: {error}")


def _check_resource(container: Container, name: str) -> Iterator[Finding]:
    request, limit = container.resource("requests", name), container.resource("limits", name)
    try:
        wanted = None if request is None else quantities.parse(request)
        most = None if limit is None else quantities.parse(limit)
    except ValueError as error:
        yield container.wrong(f"resources: {name}: {error}")
        return
    if wanted is not None and most is not None and wanted > most:
        yield container.wrong(f"resources: {name}: the request {request} is more than the limit {limit}")
    if "/" in name and (wanted != most or most is None or most % 1):
        yield container.wrong(f"resources: {name} is a device: request and limit must be the same whole number")


def _claims(cluster: Cluster) -> list[Mapping[str, Any]]:
    templates = [claim for workload in cluster.workloads for claim in workload.spec.get("volumeClaimTemplates") or []]
    return [claim.raw for claim in cluster.of("PersistentVolumeClaim")] + templates


def check_health(cluster: Cluster) -> Iterator[Finding]:
    """Whatever runs for long can be asked whether it has started, is ready and lives, at a port that it declares."""
    for container in cluster.containers:
        long_running = not container.init and container.workload.kind != "Job"
        yield from (container.wrong(f"{kind} is missing") for kind in _PROBES if long_running and kind not in container.probes)
        for kind, probe in container.probes.items():
            for method in ("httpGet", "grpc", "tcpSocket"):
                port = probe.get(method, {}).get("port")
                if port is not None and (container.ports.get(port) if isinstance(port, str) else port) not in container.ports.values():
                    yield container.wrong(f"{kind} asks port {port}, which it does not declare")


def check_spread(cluster: Cluster) -> Iterator[Finding]:
    """Several pods of one kind are not put on one machine, where there are others."""
    for workload in cluster.workloads:
        constraints = workload.pod.get("topologySpreadConstraints") or []
        if workload.several and not any(constraint["topologyKey"] == "kubernetes.io/hostname" for constraint in constraints):
            yield workload.wrong("may have several pods and does not spread them over machines")
        for constraint in constraints:
            if not matches(constraint.get("labelSelector") or {}, workload.pod_labels):
                yield workload.wrong(f"topologySpreadConstraints: the selector for {constraint['topologyKey']} does not take its own pods")
            if constraint["whenUnsatisfiable"] != "ScheduleAnyway":
                yield workload.wrong(f"topologySpreadConstraints: {constraint['topologyKey']} leaves pods pending where there are too few")


def check_images(cluster: Cluster) -> Iterator[Finding]:
    """An image without a tag is whatever somebody pushed last."""
    for container in cluster.containers:
        image: str = container.raw["image"]
        _, colon, tag = image.rpartition("/")[2].partition(":")
        if "@sha256:" not in image and (not colon or tag == "latest"):
            yield container.wrong(f"image {image} has no tag that stays")


def check_scratch(cluster: Cluster) -> Iterator[Finding]:
    """With a read-only root, /tmp must be a volume, bounded, or whatever writes a temporary file fails when it does."""
    for container in cluster.containers:
        if container.init:
            continue
        scratch = next((mount["name"] for mount in container.mounts if mount["mountPath"] == "/tmp"), None)
        volumes = {volume["name"]: volume for volume in container.workload.pod.get("volumes") or []}
        if scratch is None or "sizeLimit" not in (volumes.get(scratch, {}).get("emptyDir") or {}):
            yield container.wrong("/tmp is no emptyDir with a sizeLimit")


def grace_seconds(workload: Workload) -> int:
    """Seconds from the end's announcement to SIGKILL; Kubernetes' own default where the pod names none."""
    return int(workload.pod.get("terminationGracePeriodSeconds", 30))


def pre_stop_seconds(container: Container) -> int:
    """Seconds that pass before SIGTERM."""
    return int((container.raw.get("lifecycle") or {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
