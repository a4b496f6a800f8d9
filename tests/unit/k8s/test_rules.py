"""Every rule of tools/k8s_check can fail: the overlays, each broken in one place, and what is said about it."""

from __future__ import annotations

import pytest

from tools.k8s_check.manifests import Cluster
from tools.k8s_check.rules import RULES, check

# Their own files break the others: test_network.py, test_operation.py.
OURS = [rule for rule in RULES if rule.__module__.rpartition(".")[2] in ("references", "schemas", "pods")]


def spec(cluster, kind, name):
    return cluster.find(kind, name).raw["spec"]


def pod(cluster, kind, name):
    return spec(cluster, kind, name)["template"]["spec"]


def container(cluster, kind, name):
    return pod(cluster, kind, name)["containers"][0]


def variable(cluster, kind, name, variable_name):
    return next(item for item in container(cluster, kind, name)["env"] if item["name"] == variable_name)


def remove(cluster, kind, name):
    cluster.manifests.remove(cluster.find(kind, name))


def policy(cluster, name):
    return spec(cluster, "NetworkPolicy", name)


# What is broken, and a part of the finding that must come of it.
BROKEN = {
    "a field is misspelt": (
        lambda c: container(c, "Deployment", "gateway").update(readynessProbe={}),
        "Deployment/gateway: Kubernetes 1.32",
    ),
    "a version of an API is gone": (
        lambda c: c.find("PodDisruptionBudget", "gateway").raw.update(apiVersion="policy/v1beta1"),
        "PodDisruptionBudget/gateway: Kubernetes 1.32 has no policy/v1beta1",
    ),
    "an unknown kind": (lambda c: c.find("Service", "redis").raw.update(kind="Servise"), "has no v1 Servise"),
    "twice the same": (lambda c: c.manifests.append(c.find("Service", "redis")), "Service/redis: is defined twice"),
    "another namespace": (
        lambda c: c.find("Service", "redis").raw["metadata"].update(namespace="default"),
        "Service/redis: is in the namespace default",
    ),
    "a selector of others": (
        lambda c: spec(c, "Deployment", "gateway")["selector"].update(matchLabels={"app.kubernetes.io/name": "gatewai"}),
        "Deployment/gateway: its selector does not take its own pods",
    ),
    "a selector of too many": (
        lambda c: spec(c, "Deployment", "gateway")["selector"].update(matchLabels={"app.kubernetes.io/part-of": "tokenloom"}),
        "Deployment/gateway: its selector takes the pods of Deployment/tokenizer, too",
    ),
    "a Service of nobody": (
        lambda c: spec(c, "Service", "redis").update(selector={"app": "redis"}),
        "Service/redis: its selector takes no pods",
    ),
    "a budget of nobody": (
        lambda c: spec(c, "PodDisruptionBudget", "gateway").update(selector={"matchLabels": {"app": "gateway"}}),
        "PodDisruptionBudget/gateway: its selector takes no pods",
    ),
    "a Service's port of nobody": (
        lambda c: spec(c, "Service", "redis")["ports"][0].update(targetPort="rediss"),
        "Service/redis: targetPort rediss is not declared by StatefulSet/redis",
    ),
    "a headless Service that translates": (
        lambda c: spec(c, "Service", "gateway")["ports"][0].update(port=80),
        "Service/gateway: is headless: port 80 must be the pods' own, 8000",
    ),
    "a StatefulSet without its Service": (
        lambda c: spec(c, "StatefulSet", "worker").update(serviceName="workers"),
        "serviceName workers is not",
    ),
    "an autoscaler of nothing": (
        lambda c: spec(c, "HorizontalPodAutoscaler", "gateway")["scaleTargetRef"].update(name="gateways"),
        "scaleTargetRef Deployment/gateways is not in the manifests",
    ),
    "an autoscaler against a number": (
        lambda c: spec(c, "Deployment", "gateway").update(replicas=2),
        "a number of replicas and an autoscaler",
    ),
    "an autoscaler that cannot grow": (
        lambda c: spec(c, "HorizontalPodAutoscaler", "gateway").update(minReplicas=11),
        "minReplicas is more than maxReplicas",
    ),
    "an autoscaler without a request": (
        lambda c: container(c, "Deployment", "gateway")["resources"]["requests"].pop("cpu"),
        "HorizontalPodAutoscaler/gateway: measures cpu, which Deployment/gateway does not request",
    ),
    "a mount of nothing": (
        lambda c: container(c, "StatefulSet", "worker")["volumeMounts"][0].update(name="model"),
        "StatefulSet/worker/worker: mounts the volume model, which does not exist",
    ),
    "a volume that nobody mounts": (
        lambda c: pod(c, "StatefulSet", "worker")["volumes"].append({"name": "left", "emptyDir": {}}),
        "StatefulSet/worker: volume left is mounted nowhere",
    ),
    "a claim that is not there": (
        lambda c: remove(c, "PersistentVolumeClaim", "models"),
        "names PersistentVolumeClaim models, which is not in the manifests",
    ),
    "a key of a volume that is not there": (
        lambda c: pod(c, "Deployment", "envoy")["volumes"][0]["configMap"].update(items=[{"key": "envoy.yml", "path": "envoy.yaml"}]),
        "Deployment/envoy: volume config names key envoy.yml, which ConfigMap/envoy-",
    ),
    "a variable twice": (
        lambda c: container(c, "Deployment", "gateway")["env"].append({"name": "TOKENLOOM_PORT", "value": "1"}),
        "Deployment/gateway/gateway: TOKENLOOM_PORT is set twice",
    ),
    "a variable before its source": (
        lambda c: container(c, "StatefulSet", "worker")["env"].reverse(),
        "TOKENLOOM_ADVERTISE_ADDRESS refers to POD_IP, which does not stand before it",
    ),
    "a command's variable": (
        lambda c: container(c, "Deployment", "gateway")["command"].append("$(PORT)"),
        "its command refers to PORT, which is not set",
    ),
    "a ConfigMap that is not there": (
        lambda c: variable(c, "Deployment", "gateway", "TOKENLOOM_SERVED_MODEL_NAME")["valueFrom"]["configMapKeyRef"].update(name="models"),
        "names ConfigMap models, which is not in the manifests",
    ),
    "a key that is not there": (
        lambda c: variable(c, "Deployment", "gateway", "TOKENLOOM_SERVED_MODEL_NAME")["valueFrom"]["configMapKeyRef"].update(key="NAME"),
        "names key NAME, which ConfigMap/model-",
    ),
    "a monitor of a port that is not there": (
        lambda c: spec(c, "PodMonitor", "envoy")["podMetricsEndpoints"][0].update(port="metrics"),
        "PodMonitor/envoy: port metrics is not declared by Deployment/envoy",
    ),
    "a monitor of nobody": (
        lambda c: spec(c, "PodMonitor", "envoy").update(selector={"matchLabels": {"app": "envoy"}}),
        "PodMonitor/envoy: its selector takes no pods",
    ),
    "a monitor misspelt": (
        lambda c: spec(c, "PodMonitor", "envoy")["podMetricsEndpoints"][0].update(scrapeTimeOut="1s"),
        "PodMonitor/envoy: spec.podMetricsEndpoints.0.scrapeTimeOut: Extra inputs",
    ),
    "a monitor of a bad duration": (
        lambda c: spec(c, "PodMonitor", "envoy")["podMetricsEndpoints"][0].update(interval="15"),
        "PodMonitor/envoy: spec.podMetricsEndpoints.0.interval: String should match",
    ),
    "an alert that records": (
        lambda c: spec(c, "PrometheusRule", "tokenloom")["groups"][0]["rules"][0].update(record="a:b"),
        "PrometheusRule/tokenloom: spec.groups.0.rules.0: Value error, a rule either alerts or records",
    ),
    "a token for a pod": (
        lambda c: pod(c, "Deployment", "envoy").update(automountServiceAccountToken=True),
        "Deployment/envoy: automountServiceAccountToken is not false",
    ),
    "a token for an account": (
        lambda c: c.find("ServiceAccount", "envoy").raw.pop("automountServiceAccountToken"),
        "ServiceAccount/envoy: automountServiceAccountToken is not false",
    ),
    "an account that is not there": (
        lambda c: pod(c, "Deployment", "envoy").pop("serviceAccountName"),
        "serviceAccountName default is not in the manifests",
    ),
    "service links": (
        lambda c: pod(c, "Deployment", "envoy").pop("enableServiceLinks"),
        "Deployment/envoy: enableServiceLinks is not false",
    ),
    "a namespace that lets all in": (
        lambda c: c.find("Namespace", "tokenloom").raw["metadata"]["labels"].update({"pod-security.kubernetes.io/enforce": "baseline"}),
        "Namespace/tokenloom: does not enforce",
    ),
    "the host's network": (lambda c: pod(c, "Deployment", "envoy").update(hostNetwork=True), "Deployment/envoy: hostNetwork is set"),
    "the host's files": (
        lambda c: pod(c, "Deployment", "envoy")["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        "volume host is of a kind that `restricted` refuses: hostPath",
    ),
    "the host's port": (
        lambda c: container(c, "Deployment", "envoy")["ports"][0].update(hostPort=80),
        "Deployment/envoy/envoy: it has a hostPort",
    ),
    "root allowed": (lambda c: pod(c, "Deployment", "envoy")["securityContext"].pop("runAsNonRoot"), "runAsNonRoot is not true"),
    "root wanted": (
        lambda c: pod(c, "Deployment", "envoy")["securityContext"].update(runAsUser=0),
        "runAsUser is not a number other than 0",
    ),
    "no seccomp": (
        lambda c: pod(c, "Deployment", "envoy")["securityContext"].pop("seccompProfile"),
        "seccompProfile is not RuntimeDefault",
    ),
    "escalation": (
        lambda c: container(c, "Deployment", "envoy")["securityContext"].pop("allowPrivilegeEscalation"),
        "allowPrivilegeEscalation is not false",
    ),
    "a writable root": (
        lambda c: container(c, "Deployment", "envoy")["securityContext"].pop("readOnlyRootFilesystem"),
        "readOnlyRootFilesystem is not true",
    ),
    "a privileged container": (
        lambda c: container(c, "Deployment", "envoy")["securityContext"].update(privileged=True),
        "envoy/envoy: it is privileged",
    ),
    "capabilities kept": (
        lambda c: container(c, "Deployment", "envoy")["securityContext"].pop("capabilities"),
        "capabilities do not drop ALL",
    ),
    "capabilities added": (
        lambda c: container(c, "Deployment", "envoy")["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
        "capabilities are added",
    ),
    "an init container that is not confined": (
        lambda c: pod(c, "StatefulSet", "worker")["initContainers"][0].pop("securityContext"),
        "StatefulSet/worker/wait-for-model: allowPrivilegeEscalation is not false",
    ),
    "no request": (
        lambda c: container(c, "Deployment", "envoy")["resources"]["requests"].pop("memory"),
        "resources.requests.memory is missing",
    ),
    "no limit": (lambda c: container(c, "Deployment", "envoy")["resources"].pop("limits"), "resources.limits.memory is missing"),
    "a request over its limit": (
        lambda c: container(c, "Deployment", "envoy")["resources"]["requests"].update(memory="2Gi"),
        "memory: the request 2Gi is more than the limit 1Gi",
    ),
    "a bad quantity": (lambda c: container(c, "Deployment", "envoy")["resources"]["requests"].update(memory="2GB"), "'2GB' is no quantity"),
    "half a device": (
        lambda c: container(c, "StatefulSet", "worker")["resources"]["limits"].update({"nvidia.com/gpu": 1}),
        "nvidia.com/gpu is a device",
    ),
    "a bad size of a volume": (
        lambda c: spec(c, "PersistentVolumeClaim", "models")["resources"]["requests"].update(storage="ten"),
        "PersistentVolumeClaim/models: storage: 'ten' is no quantity",
    ),
    "no probe": (lambda c: container(c, "Deployment", "envoy").pop("startupProbe"), "Deployment/envoy/envoy: startupProbe is missing"),
    "a probe of another port": (
        lambda c: container(c, "StatefulSet", "worker")["readinessProbe"]["grpc"].update(port=50052),
        "StatefulSet/worker/worker: readinessProbe asks port 50052, which it does not declare",
    ),
    "a probe of an unknown name": (
        lambda c: container(c, "Deployment", "gateway")["readinessProbe"]["httpGet"].update(port="web"),
        "readinessProbe asks port web",
    ),
    "all on one machine": (lambda c: pod(c, "Deployment", "envoy").pop("topologySpreadConstraints"), "does not spread them over machines"),
    "a spread of others": (
        lambda c: pod(c, "Deployment", "envoy")["topologySpreadConstraints"][0].update(labelSelector={"matchLabels": {"app": "envoy"}}),
        "does not take its own pods",
    ),
    "a spread that insists": (
        lambda c: pod(c, "Deployment", "envoy")["topologySpreadConstraints"][1].update(whenUnsatisfiable="DoNotSchedule"),
        "leaves pods pending where there are too few",
    ),
    "an image without a tag": (
        lambda c: container(c, "Deployment", "envoy").update(image="registry:5000/envoy"),
        "image registry:5000/envoy has no tag that stays",
    ),
    "the latest image": (
        lambda c: container(c, "Deployment", "envoy").update(image="envoy:latest"),
        "image envoy:latest has no tag that stays",
    ),
    "no place for temporary files": (
        lambda c: pod(c, "Deployment", "envoy")["volumes"][1].update(emptyDir={}),
        "/tmp is no emptyDir with a sizeLimit",
    ),
}


@pytest.mark.parametrize(("breaks", "said"), BROKEN.values(), ids=list(BROKEN))
def test_what_is_broken_is_found(rendered, breaks, said):
    cluster = rendered("cpu", "monitoring")
    breaks(cluster)
    findings = [str(finding) for finding in check(Cluster([manifest.raw for manifest in cluster.manifests]))]
    assert [finding for finding in findings if said in finding], findings


def test_every_rule_has_been_seen_to_fail(rendered):
    failing = set()
    for breaks, _ in BROKEN.values():
        cluster = rendered("cpu", "monitoring")
        breaks(cluster)
        broken = Cluster([manifest.raw for manifest in cluster.manifests])
        failing |= {rule.__name__ for rule in OURS if _fails(rule, broken)}
    assert failing == {rule.__name__ for rule in OURS}


def _fails(rule, cluster) -> bool:
    try:
        return bool(list(rule(cluster)))
    except (KeyError, ValueError):  # a shape that the schemas refuse first
        return False
