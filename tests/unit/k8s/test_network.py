"""What policies let through: the mesh's edges and no others, in every overlay; each missing or superfluous half is found."""

from __future__ import annotations

import copy

import pytest

from tools.k8s_check.edges import Edge, wanted_edges
from tools.k8s_check.manifests import Cluster, matches
from tools.k8s_check.network import allowed_edges, check_network, openings

# By hand, from docs/architecture.md: the tool derives its own from what the services are told to dial.
GRAPH = {
    ("envoy", "gateway", 8000),
    ("envoy", "tokenizer", 7001),
    ("gateway", "envoy", 7000),
    ("gateway", "scheduler", 50052),
    ("scheduler", "tokenizer", 7001),
    ("scheduler", "worker", 50051),
}
STORE = {(name, "redis", 6379) for name in ("gateway", "scheduler", "worker")}


def triples(edges):
    return {(edge.source, edge.target, edge.port) for edge in edges}


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "minimal"])
def test_the_edges_of_the_mesh_pass_and_no_others(rendered, overlay):
    cluster = rendered(overlay)
    assert triples(allowed_edges(cluster)) == triples(wanted_edges(cluster)) == GRAPH | STORE


def test_with_an_external_redis_its_clients_leave_the_namespace(rendered):
    cluster = rendered("cpu", "external-redis")
    assert triples(allowed_edges(cluster)) == GRAPH
    leaving = {(way.workload, way.port) for way in openings(cluster) if way.peer == "any address"}
    assert leaving == {(name, port) for name in ("gateway", "scheduler", "worker") for port in ("6379", "6380")}


def test_with_tracing_every_service_and_envoy_reach_the_collector_and_it_alone_jaeger(rendered):
    cluster = rendered("gpu", "tracing")
    exporting = {(name, "otel-collector", 4317) for name in ("gateway", "tokenizer", "scheduler", "worker", "envoy")}
    assert triples(allowed_edges(cluster)) == GRAPH | STORE | exporting
    assert {(way.workload, way.port) for way in openings(cluster) if way.peer == "namespace observability"} == {("otel-collector", "4317")}


def test_prometheus_reaches_metrics_and_nothing_else(rendered):
    opened = {(way.workload, way.port) for way in openings(rendered("cpu", "monitoring")) if way.peer == "namespace monitoring"}
    assert opened == {("gateway", "8000"), ("tokenizer", "9100"), ("scheduler", "9100"), ("worker", "9100"), ("envoy", "9902")}


def test_clients_reach_envoy_and_only_the_import_reaches_the_internet(rendered):
    ways = {(way.direction, way.workload, way.peer, way.port) for way in openings(rendered("minimal")) if "kube-dns" not in way.peer}
    assert ways == {("in", "envoy", "anyone", "8080"), ("out", "model-import", "the internet", "443")}


def test_every_half_of_every_edge_is_needed(rendered):
    """Each peer of each rule, taken away: something is then blocked."""
    whole = rendered("minimal")
    for index, manifest in enumerate(whole.manifests):
        if manifest.kind != "NetworkPolicy":
            continue
        for field, peers in (("ingress", "from"), ("egress", "to")):
            for number, rule in enumerate(manifest.raw["spec"].get(field) or []):
                for peer in range(max(1, len(rule.get(peers) or []))):
                    raws = copy.deepcopy([other.raw for other in whole.manifests])
                    rules = raws[index]["spec"][field]
                    if len(rule.get(peers) or []) > 1:
                        del rules[number][peers][peer]
                    else:
                        del rules[number]
                    assert [str(f) for f in check_network(Cluster(raws)) if "blocks" in str(f)], (manifest.name, field, number)


def policy(cluster, name):
    return cluster.find("NetworkPolicy", name).raw["spec"]


def scheduler_address(cluster):
    return next(item for item in cluster.workload("gateway").containers[0].env if item["name"] == "TOKENLOOM_SCHEDULER_ADDRESS")


FLAWS = {
    "no denial": (
        lambda c: c.manifests.remove(c.find("NetworkPolicy", "default-deny")),
        "StatefulSet/redis: no NetworkPolicy restricts its Egress",
    ),
    "all ports": (lambda c: policy(c, "worker")["ingress"][0].pop("ports"), "NetworkPolicy/worker: an ingress rule names no ports"),
    "any pod": (
        lambda c: policy(c, "worker")["ingress"].append({"ports": [{"port": "grpc"}]}),
        "opens without a reason: worker <- anyone, port 50051",
    ),
    "a peer too many": (
        lambda c: (
            policy(c, "worker")["ingress"][0]["from"].append({"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}),
            policy(c, "gateway")["egress"].append({"to": [{"podSelector": {}}], "ports": [{"port": 50051}]}),
        ),
        "lets through what nobody dials: gateway -> worker:50051",
    ),
    "another namespace": (
        lambda c: policy(c, "worker")["ingress"][0]["from"].append({"namespaceSelector": {}}),
        "opens without a reason: worker <- namespace any, port 50051",
    ),
    "the whole network": (
        lambda c: policy(c, "gateway")["egress"].append({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}),
        "opens without a reason: gateway -> any address, port 443",
    ),
    "every IPv6 address": (
        lambda c: policy(c, "gateway")["egress"].append({"to": [{"ipBlock": {"cidr": "::/0"}}], "ports": [{"port": 443}]}),
        "opens without a reason: gateway -> any address, port 443",
    ),
    "policyTypes that hide a rule": (
        lambda c: policy(c, "gateway").update(policyTypes=["Ingress"]),
        "has egress rules, but Egress is not among its policyTypes",
    ),
    "a policy of nobody": (
        lambda c: policy(c, "worker").update(podSelector={"matchLabels": {"app": "worker"}}),
        "NetworkPolicy/worker: its podSelector takes no pods",
    ),
    "a peer of nobody": (
        lambda c: policy(c, "worker")["ingress"][0]["from"].append({"podSelector": {"matchLabels": {"app": "x"}}}),
        "takes no pods",
    ),
    "a port of nobody": (
        lambda c: policy(c, "worker")["ingress"][0]["ports"].append({"port": 1}),
        "NetworkPolicy/worker: port 1 is not declared by StatefulSet/worker",
    ),
    "a name that another pod does not have": (
        lambda c: policy(c, "scheduler")["egress"][0]["ports"].append({"port": "http"}),
        "NetworkPolicy/scheduler: port http is not declared by Deployment/tokenizer",
    ),
    "an address that no Service has": (
        lambda c: scheduler_address(c).update(value="scheduler:50051"),
        "dials scheduler:50051, which Service/scheduler does not have",
    ),
}


@pytest.mark.parametrize(("breaks", "said"), FLAWS.values(), ids=list(FLAWS))
def test_a_flaw_is_found(rendered, breaks, said):
    cluster = rendered("minimal")
    breaks(cluster)
    findings = [str(finding) for finding in check_network(Cluster([manifest.raw for manifest in cluster.manifests]))]
    assert [finding for finding in findings if said in finding], findings


def test_a_block_of_addresses_takes_pods_unless_it_spares_every_private_one(rendered):
    cluster = rendered("minimal")
    policy(cluster, "model-import")["egress"][0]["ports"] = [{"port": 6379}]
    assert Edge("model-import", "redis", 6379) not in allowed_edges(cluster)
    policy(cluster, "model-import")["egress"][0]["to"][0]["ipBlock"]["except"].remove("10.0.0.0/8")
    policy(cluster, "redis")["ingress"][0].pop("from")
    assert Edge("model-import", "redis", 6379) in allowed_edges(cluster)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ({"key": "a", "operator": "In", "values": ["1", "2"]}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, False),
        ({"key": "b", "operator": "NotIn", "values": ["1"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "b", "operator": "Exists"}, False),
        ({"key": "b", "operator": "DoesNotExist"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
    ],
)
def test_label_selectors_are_read_as_kubernetes_reads_them(expression, holds):
    assert matches({"matchExpressions": [expression]}, {"a": "1"}) is holds
