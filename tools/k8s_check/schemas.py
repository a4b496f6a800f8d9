"""Shapes: Kubernetes' own schemas by kubernetes-validate, and ours for the Prometheus operator's kinds, which it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate

from tools.k8s_check.manifests import Cluster, Finding

# The oldest release that the manifests are for (it has everything they use; docs/kubernetes.md), and the newest that can be checked.
VERSIONS = ("1.32", kubernetes_validate.latest_version())

_DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$", "minLength": 2}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"matchLabels": _STRINGS, "matchExpressions": {"type": "array"}},
}
_RELABELING = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "sourceLabels": {"type": "array", "items": {"type": "string"}},
        "regex": {"type": "string"},
        "action": {"enum": ["keep", "drop", "replace", "labelmap", "labeldrop", "labelkeep"]},
        "targetLabel": {"type": "string"},
        "replacement": {"type": "string"},
    },
}
_ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port"],
    "properties": {
        "port": {"type": "string"},
        "path": {"type": "string", "pattern": "^/"},
        "interval": _DURATION,
        "scrapeTimeout": _DURATION,
        "relabelings": {"type": "array", "items": _RELABELING},
        "metricRelabelings": {"type": "array", "items": _RELABELING},
    },
}
_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["expr"],
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
    "properties": {
        "alert": {"type": "string"},
        "record": {"type": "string"},
        "expr": {"type": "string"},
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": _STRINGS,
        "annotations": _STRINGS,
    },
}
_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "rules"],
    "properties": {"name": {"type": "string"}, "interval": _DURATION, "rules": {"type": "array", "minItems": 1, "items": _RULE}},
}


def _spec(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_SPECS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _spec(
        ["selector", "podMetricsEndpoints"],
        selector=_SELECTOR,
        jobLabel={"type": "string"},
        podTargetLabels={"type": "array", "items": {"type": "string"}},
        podMetricsEndpoints={"type": "array", "minItems": 1, "items": _ENDPOINT},
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _spec(["groups"], groups={"type": "array", "minItems": 1, "items": _GROUP}),
}


def check_schemas(cluster: Cluster) -> Iterator[Finding]:
    """Every object fits its schema in the oldest and the newest release; a kind or version that either does not have is a finding."""
    for manifest in cluster.manifests:
        own = _SPECS.get((manifest.raw["apiVersion"], manifest.kind))
        if own is not None:
            errors = jsonschema.Draft202012Validator(own).iter_errors(manifest.raw.get("spec"))
            yield from (manifest.wrong(f"spec{_path(error)}: {error.message}") for error in errors)
            continue
        yield from (manifest.wrong(problem) for problem in _problems(json.dumps(manifest.raw)))


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
        yield f"Kubernetes {version}: {_path(error)}: {error.message}"


def _path(error: jsonschema.ValidationError) -> str:
    return "".join(f".{part}" for part in error.absolute_path)


def check_monitors(cluster: Cluster) -> Iterator[Finding]:
    """A monitor's ports are declared by the pods that it selects."""
    for monitor in cluster.of("PodMonitor"):
        for workload in cluster.selected(monitor.spec.get("selector") or {}):
            for endpoint in monitor.spec.get("podMetricsEndpoints") or []:
                if workload.port(endpoint["port"]) is None:
                    yield monitor.wrong(f"port {endpoint['port']} is not declared by {workload}")
