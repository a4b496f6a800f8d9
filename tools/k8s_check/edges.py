"""Who must reach whom: read out of what the services are told to dial, so that no list of it can grow old."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from tools.k8s_check.manifests import LOADER, Cluster, Container, Manifest, Workload

# "scheduler:50052", "redis://redis:6379/0", "http://otel-collector:4317": names of the namespace's own Services are one word.
_ADDRESS = re.compile(r"(?:^|//|,|@)([a-z][a-z0-9-]*):(\d+)(?=$|[/,])")
# "jaeger-collector.observability.svc:4317", "...svc.cluster.local:4317"
_ELSEWHERE = re.compile(r"(?:^|//|,|@)[a-z][a-z0-9-]*\.([a-z0-9-]+)\.svc[a-z.]*:(\d+)(?=$|[/,])")
# Who registers an address in the store is dialled there by whoever reads that part of the registry (libs/store/registry.py).
_REGISTERED = "TOKENLOOM_ADVERTISE_ADDRESS"
_REGISTRY_READERS = {"worker": "scheduler", "scheduler": "gateway"}
_DNS = "namespace kube-system, pods k8s-app=kube-dns"


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """One workload's pods reach another's at this port (TCP, the container's number)."""

    source: str
    target: str
    port: int

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class Opening:
    """A way in or out of the namespace: `direction` is "in" or "out", `peer` who is at the other end, "anyone" included."""

    direction: str
    workload: str
    peer: str
    port: str

    def __str__(self) -> str:
        return f"{self.workload} {'<-' if self.direction == 'in' else '->'} {self.peer}, port {self.port}"


def wanted_edges(cluster: Cluster) -> set[Edge]:
    """Every edge within the namespace that its configuration makes."""
    found = set()
    for container in cluster.containers:
        for host, port in dialled(container, cluster):
            for service in cluster.of("Service"):
                if service.name == host:
                    found |= _through(service, port, container.workload, cluster)
        registered = container.values.get(_REGISTERED)
        if registered is not None:
            found.add(Edge(_REGISTRY_READERS[container.workload.name], container.workload.name, int(registered.rpartition(":")[2])))
    return found


def dialled(container: Container, cluster: Cluster) -> Iterator[tuple[str, int]]:
    """Hosts and ports that a container's environment and configuration files name."""
    for value in container.values.values():
        yield from ((host, int(port)) for host, port in _ADDRESS.findall(value))
    for volume in container.workload.pod.get("volumes") or []:
        configuration = cluster.find("ConfigMap", (volume.get("configMap") or {}).get("name", ""))
        if configuration is not None and volume["name"] in {mount["name"] for mount in container.mounts}:
            yield from _configured(configuration)


def _configured(configuration: Manifest) -> Iterator[tuple[str, int]]:
    for name, text in (configuration.raw.get("data") or {}).items():
        if name.endswith((".yaml", ".yml")):
            yield from _addresses(text)


@lru_cache(maxsize=64)
def _addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Addresses in a file of Envoy's (socket_address) or the collector's (endpoint)."""
    found: list[tuple[str, int]] = []
    for part in _parts(yaml.load(text, LOADER)):
        address, endpoint = part.get("socket_address"), part.get("endpoint")
        if isinstance(address, Mapping):
            found.append((str(address["address"]), int(address["port_value"])))
        if isinstance(endpoint, str):
            found += [(host, int(port)) for host, port in _ADDRESS.findall(endpoint)]
    return tuple(found)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in a document, however deep."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _parts(item)


def _through(service: Manifest, port: int, source: Workload, cluster: Cluster) -> set[Edge]:
    """What dialling a port of a Service reaches."""
    targets = [declared.get("targetPort", declared["port"]) for declared in service.spec.get("ports") or [] if declared["port"] == port]
    behind = cluster.selected({"matchLabels": service.spec["selector"]}) if service.spec.get("selector") else []
    numbers = [(workload, workload.port(target)) for workload in behind for target in targets]
    return {Edge(source.name, workload.name, number) for workload, number in numbers if number is not None}


def unreachable(cluster: Cluster) -> Iterator[str]:
    """Addresses whose host is a Service here that does not have this port."""
    for container in cluster.containers:
        for host, port in dialled(container, cluster):
            service = cluster.find("Service", host)
            if service is not None and port not in {declared["port"] for declared in service.spec.get("ports") or []}:
                yield f"{container.workload}/{container.name} dials {host}:{port}, which {service} does not have"


def wanted_openings(cluster: Cluster) -> set[Opening]:
    """The ways in and out that the manifests have a reason for."""
    found = {Opening("in", "envoy", "anyone", "8080")}
    dialling = {edge.source for edge in wanted_edges(cluster)} | {"model-import", *_of_external_stores(cluster)}
    dialling |= {name for name, _, _ in _elsewhere(cluster)}
    for workload in cluster.workloads:
        # Redis alone never looks a name up. Tokenizers do once they are told of a collector, and may before.
        if workload.name in dialling or workload.name == "tokenizer":
            found |= {Opening("out", workload.name, _DNS, f"53/{protocol}") for protocol in ("UDP", "TCP")}
    if any(workload.name == "model-import" for workload in cluster.workloads):
        found.add(Opening("out", "model-import", "the internet", "443"))
    for name in _of_external_stores(cluster):
        found |= {Opening("out", name, "any address", port) for port in ("6379", "6380")}
    for monitor in cluster.of("PodMonitor"):
        for workload in cluster.selected(monitor.spec["selector"]):
            for endpoint in monitor.spec["podMetricsEndpoints"]:
                found.add(Opening("in", workload.name, "namespace monitoring", str(workload.port(endpoint["port"]))))
    found |= {Opening("out", name, f"namespace {namespace}", str(port)) for name, namespace, port in _elsewhere(cluster)}
    return found


def _of_external_stores(cluster: Cluster) -> set[str]:
    """Who takes the store's address out of a Secret: it is not in the namespace."""
    return {
        container.workload.name
        for container in cluster.containers
        for item in container.env
        if item["name"] == "TOKENLOOM_STORE" and "secretKeyRef" in (item.get("valueFrom") or {})
    }


def _elsewhere(cluster: Cluster) -> set[tuple[str, str, int]]:
    """Workloads that dial a Service of another namespace, that namespace, and the port."""
    return {
        (container.workload.name, namespace, int(port))
        for container in cluster.containers
        for value in container.values.values()
        for namespace, port in _ELSEWHERE.findall(value)
    }
