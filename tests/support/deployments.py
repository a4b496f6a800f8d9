"""How a service is started by a rendered Kubernetes manifest, and by compose with its image: command, environment and probes of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tools.k8s_check.manifests import Cluster, Container
from tools.k8s_check.rendering import ROOT

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
# What a pod learns of itself only when it runs.
POD = {"metadata.name": "{name}-0", "metadata.namespace": "tokenloom", "status.podIP": "10.1.2.3"}
SECRETS = {("api-keys", "keys"): "key-1,key-2", ("redis", "url"): "rediss://:secret@redis.example.com:6380/0"}


@dataclass(frozen=True, slots=True)
class Start:
    """What a container runs, with which variables."""

    command: list[str]
    env: dict[str, str]


def kubernetes_start(container: Container, cluster: Cluster, pod: Mapping[str, str] = POD) -> Start:
    """As the kubelet would start it: references looked up, $(NAME) replaced by what stands before it."""
    env: dict[str, str] = {}
    for item in container.env:
        value = _value(item, container, cluster, pod)
        if value is not None:
            env[item["name"]] = _expand(value, env)
    return Start([_expand(word, env) for word in container.command], env)


def _value(item: Mapping[str, Any], container: Container, cluster: Cluster, pod: Mapping[str, str]) -> str | None:
    if "valueFrom" not in item:
        return str(item.get("value", ""))
    ((kind, source),) = item["valueFrom"].items()
    if kind == "fieldRef":
        return pod[source["fieldPath"]].format(name=container.workload.name)
    if kind == "configMapKeyRef":
        found = cluster.find("ConfigMap", source["name"])
        assert found is not None
        return str(found.raw["data"][source["key"]])
    assert kind == "secretKeyRef", kind
    return SECRETS.get((source["name"], source["key"])) if source.get("optional") else SECRETS[source["name"], source["key"]]


def _expand(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


@dataclass(frozen=True, slots=True)
class Stage:
    """A target of deploy/Dockerfile: ENV, ENTRYPOINT, CMD and the command of its HEALTHCHECK."""

    env: dict[str, str]
    entrypoint: list[str]
    cmd: list[str]
    healthcheck: list[str]


def stage(name: str) -> Stage:
    """Read as text: the services' stages use each of these instructions once, in its JSON form."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "deploy/Dockerfile").read_text())
    (body,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)

    def words(instruction: str) -> list[str]:
        found = re.search(rf"^{instruction}.*?(\[.*\])$", body, re.MULTILINE)
        return list(json.loads(found[1])) if found else []

    env = dict(pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", body, re.MULTILINE) for pair in line.split())
    return Stage(env, words("ENTRYPOINT"), words("CMD"), words("HEALTHCHECK"))


def compose_services() -> dict[str, dict[str, Any]]:
    """docker-compose.yml, with the defaults of its variables."""
    text = (ROOT / "docker-compose.yml").read_text()
    variable = re.compile(r"\$\{(\w+)(?::?-((?:[^${}]|\$\{[^{}]*\})*))?\}")
    while variable.search(text):
        text = variable.sub(lambda match: match[2] or "", text)
    return dict(yaml.safe_load(text)["services"])


def compose_start(name: str) -> Start:
    """As compose would start a service's image."""
    service, image = compose_services()[name], stage(name)
    given = {key: str(value) for key, value in service.get("environment", {}).items()}
    return Start([*image.entrypoint, *image.cmd], image.env | given)
