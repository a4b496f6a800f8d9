"""Shapes: Kubernetes' own schemas by kubernetes-validate, and ours for the Prometheus operator's kinds, which it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import kubernetes_validate
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tools.k8s_check.manifests import Cluster, Finding

# The oldest release that the manifests are for (it has everything they use; docs/kubernetes.md), and the newest that can be checked.
VERSIONS = ("1.32", kubernetes_validate.latest_version())

_Duration = Annotated[str, Field(pattern=r"^(\d+h)?(\d+m)?(\d+s)?$", min_length=2)]


class _Part(BaseModel):
    """A part of the operator's kinds: the fields that are used here, any other is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Selector(_Part):
    matchLabels: dict[str, str] = {}
    matchExpressions: list[dict[str, Any]] = []


class _Relabeling(_Part):
    sourceLabels: list[str] = []
    regex: str = ""
    action: Literal["keep", "drop", "replace", "labelmap", "labeldrop", "labelkeep"] = "replace"
    targetLabel: str = ""
    replacement: str = ""


class _Endpoint(_Part):
    port: str
    path: str = Field("/metrics", pattern="^/")
    interval: _Duration | None = None
    scrapeTimeout: _Duration | None = None
    relabelings: list[_Relabeling] = []
    metricRelabelings: list[_Relabeling] = []


class _PodMonitor(_Part):
    selector: _Selector
    podMetricsEndpoints: list[_Endpoint] = Field(min_length=1)
    jobLabel: str = ""
    podTargetLabels: list[str] = []


class _Rule(_Part):
    expr: str
    alert: str | None = None
    record: str | None = None
    duration: _Duration | None = Field(None, alias="for")
    keep_firing_for: _Duration | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_of_two(self) -> _Rule:
        if (self.alert is None) == (self.record is None):
            raise ValueError("a rule either alerts or records")
        return self


class _Group(_Part):
    name: str
    rules: list[_Rule] = Field(min_length=1)
    interval: _Duration | None = None


class _PrometheusRule(_Part):
    groups: list[_Group] = Field(min_length=1)


_OPERATORS: Mapping[tuple[str, str], type[_Part]] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PrometheusRule,
}


def check_schemas(cluster: Cluster) -> Iterator[Finding]:
    """Every object fits its schema in the oldest and the newest release; a kind or version that either does not have is a finding."""
    for manifest in cluster.manifests:
        own = _OPERATORS.get((manifest.raw["apiVersion"], manifest.kind))
        problems = _misfits(own, manifest.raw.get("spec")) if own is not None else _problems(json.dumps(manifest.raw))
        yield from (manifest.wrong(problem) for problem in problems)


def _misfits(model: type[_Part], spec: Any) -> list[str]:
    try:
        model.model_validate(spec)
    except ValidationError as error:
        return [f"{'.'.join(map(str, ('spec', *problem['loc'])))}: {problem['msg']}" for problem in error.errors()]
    return []


@cache
def _problems(text: str) -> tuple[str, ...]:
    """Of one object, as JSON. Remembered, for most objects are the same in every variant, and kubernetes-validate reads its files anew."""
    return tuple(problem for version in VERSIONS for problem in _validate(json.loads(text), version))


def _validate(raw: Mapping[str, Any], version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(raw, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        yield f"Kubernetes {version} has no {raw['apiVersion']} {raw['kind']}"
    except kubernetes_validate.ValidationError as error:
        yield f"Kubernetes {version}: {'.'.join(map(str, error.absolute_path))}: {error.message}"


def check_monitors(cluster: Cluster) -> Iterator[Finding]:
    """A monitor's ports are declared by the pods that it selects."""
    for monitor in cluster.of("PodMonitor"):
        for workload in cluster.selected(monitor.spec.get("selector") or {}):
            for endpoint in monitor.spec.get("podMetricsEndpoints") or []:
                if workload.port(endpoint["port"]) is None:
                    yield monitor.wrong(f"port {endpoint['port']} is not declared by {workload}")
