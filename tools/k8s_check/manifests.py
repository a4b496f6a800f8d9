"""Rendered manifests as the rules read them. What is wrong in shape is the schemas' business; the views here take what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

POD_KINDS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
Labels = Mapping[str, str]
# libyaml's, where there is one, reads ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: `where` is "Kind/name", perhaps with a container's name behind it."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class Manifest:
    """One object of Kubernetes."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.kind: str = raw["kind"]
        self.name: str = raw["metadata"]["name"]
        self.namespace: str = raw["metadata"].get("namespace", "")
        self.spec: Mapping[str, Any] = raw.get("spec") or {}
        self.labels: Labels = raw["metadata"].get("labels") or {}

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def wrong(self, problem: str) -> Finding:
        """A finding about this object."""
        return Finding(str(self), problem)


class Container:
    """A container of a workload's pods; `init`: one that ends before the others start."""

    def __init__(self, raw: Mapping[str, Any], workload: Workload, *, init: bool) -> None:
        self.raw, self.workload, self.init = raw, workload, init
        self.name: str = raw["name"]
        self.env: Sequence[Mapping[str, Any]] = raw.get("env") or []
        self.mounts: Sequence[Mapping[str, Any]] = raw.get("volumeMounts") or []
        self.probes = {kind: raw[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in raw}

    @property
    def command(self) -> list[str]:
        """What it runs, arguments included."""
        return [*(self.raw.get("command") or []), *(self.raw.get("args") or [])]

    @property
    def ports(self) -> dict[str, int]:
        """Declared ports by name; one without a name by its number."""
        return {port.get("name", str(port["containerPort"])): port["containerPort"] for port in self.raw.get("ports") or []}

    @property
    def values(self) -> dict[str, str]:
        """The environment that stands in the manifest itself."""
        return {item["name"]: item["value"] for item in self.env if item.get("value") is not None}

    def resource(self, kind: str, name: str) -> str | None:
        """A quantity as it is written; `kind` is "requests" or "limits"."""
        value = (self.raw.get("resources") or {}).get(kind, {}).get(name)
        return None if value is None else str(value)

    def wrong(self, problem: str) -> Finding:
        """A finding about this container."""
        return Finding(f"{self.workload}/{self.name}", problem)


class Workload(Manifest):
    """What makes pods."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__(raw)
        self.template: Mapping[str, Any] = self.spec.get("template") or {}
        self.pod: Mapping[str, Any] = self.template.get("spec") or {}
        self.pod_labels: Labels = (self.template.get("metadata") or {}).get("labels") or {}

    @cached_property
    def containers(self) -> list[Container]:
        """Init containers first."""
        init = [Container(raw, self, init=True) for raw in self.pod.get("initContainers") or []]
        return init + [Container(raw, self, init=False) for raw in self.pod.get("containers") or []]

    @property
    def ports(self) -> dict[str, int]:
        """Declared ports of all its containers."""
        return {name: port for container in self.containers for name, port in container.ports.items()}

    @property
    def port_numbers(self) -> set[int]:
        """Every port that it declares."""
        return {port["containerPort"] for container in self.containers for port in container.raw.get("ports") or []}

    def port(self, wanted: str | int) -> int | None:
        """The number of a declared port given by name or number; None: there is no such port."""
        return self.ports.get(wanted) if isinstance(wanted, str) else wanted if wanted in self.port_numbers else None

    @property
    def several(self) -> bool:
        """Whether it may have more than one pod at a time: an autoscaler's (no number given), or by its number."""
        return self.kind != "Job" and self.spec.get("replicas", 2) > 1


class Cluster:
    """All manifests of one rendering."""

    def __init__(self, documents: Iterator[Any] | Sequence[Any]) -> None:
        raws = [raw for raw in documents if raw]
        self.manifests = [Workload(raw) if raw["kind"] in POD_KINDS else Manifest(raw) for raw in raws]

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """From YAML. Raises yaml.YAMLError."""
        return cls(yaml.load_all(text, LOADER))

    @property
    def workloads(self) -> list[Workload]:
        """What makes pods."""
        return [manifest for manifest in self.manifests if isinstance(manifest, Workload)]

    @property
    def containers(self) -> list[Container]:
        """Of all workloads."""
        return [container for workload in self.workloads for container in workload.containers]

    def of(self, *kinds: str) -> list[Manifest]:
        """The objects of these kinds."""
        return [manifest for manifest in self.manifests if manifest.kind in kinds]

    def find(self, kind: str, name: str) -> Manifest | None:
        """The object of this kind and name, if it is here."""
        return next((manifest for manifest in self.of(kind) if manifest.name == name), None)

    def workload(self, name: str) -> Workload:
        """The workload of this name. Raises KeyError."""
        for workload in self.workloads:
            if workload.name == name:
                return workload
        raise KeyError(name)

    def selected(self, selector: Mapping[str, Any]) -> list[Workload]:
        """Whose pods a label selector takes."""
        return [workload for workload in self.workloads if matches(selector, workload.pod_labels)]


def matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a label selector (matchLabels and matchExpressions) takes these labels. An empty one takes all."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _holds(expression: Mapping[str, Any], labels: Labels) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    return {"In": value in values, "NotIn": value not in values, "Exists": value is not None, "DoesNotExist": value is None}[
        expression["operator"]
    ]
