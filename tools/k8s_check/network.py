"""What NetworkPolicies let through, computed for every pair of workloads and every port, and compared with what must pass.

A connection passes when the source's policies let it leave and the target's let it enter; a pod that no policy of a direction selects is
open in that direction. Policies only ever add.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.edges import Edge, Opening, unreachable, wanted_edges, wanted_openings
from tools.k8s_check.manifests import Cluster, Finding, Manifest, Workload, matches

# Where pods have their addresses: a block that takes any of these may mean pods, whatever was meant.
_PRIVATE = [ipaddress.IPv4Network(block) for block in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16")]
_DIRECTIONS = {"in": ("Ingress", "ingress", "from"), "out": ("Egress", "egress", "to")}
_Rule = Mapping[str, Any]


def check_network(cluster: Cluster) -> Iterator[Finding]:
    """Everything is denied but the edges and openings that the configuration makes; nothing more is let through, nothing less."""
    yield from (Finding("addresses", problem) for problem in unreachable(cluster))
    for workload in cluster.workloads:
        for kind, _, _ in _DIRECTIONS.values():
            if not any(kind in _types(policy) and _selects(policy, workload) for policy in cluster.of("NetworkPolicy")):
                yield workload.wrong(f"no NetworkPolicy restricts its {kind}: everything is let through")
    for policy in cluster.of("NetworkPolicy"):
        yield from _check_policy(policy, cluster)
    allowed, wanted = allowed_edges(cluster), wanted_edges(cluster)
    yield from (Finding("NetworkPolicy", f"blocks {edge}") for edge in sorted(wanted - allowed))
    yield from (Finding("NetworkPolicy", f"lets through what nobody dials: {edge}") for edge in sorted(allowed - wanted))
    open_ways, reasons = openings(cluster), wanted_openings(cluster)
    yield from (Finding("NetworkPolicy", f"blocks {opening}") for opening in sorted(reasons - open_ways))
    yield from (Finding("NetworkPolicy", f"opens without a reason: {opening}") for opening in sorted(open_ways - reasons))


def allowed_edges(cluster: Cluster) -> set[Edge]:
    """Every pair of different workloads and declared port that a connection may be made on."""
    return {
        Edge(source.name, target.name, port)
        for source in cluster.workloads
        for target in cluster.workloads
        for port in target.port_numbers
        if source is not target and _passes("out", source, target, port, cluster) and _passes("in", target, source, port, cluster)
    }


def openings(cluster: Cluster) -> set[Opening]:
    """What policies open to peers that are not pods of the namespace."""
    found = set()
    for policy in cluster.of("NetworkPolicy"):
        for direction in _DIRECTIONS:
            for workload in cluster.workloads:
                if _selects(policy, workload):
                    found |= set(_ways(direction, workload, _rules(policy, direction)))
    return found


def _ways(direction: str, workload: Workload, rules: Sequence[_Rule]) -> Iterator[Opening]:
    for rule in rules:
        peers = [_outside(peer) for peer in rule.get(_DIRECTIONS[direction][2]) or [{}]]
        for peer in (peer for peer in peers if peer is not None):
            for port in rule.get("ports") or [{"port": "any"}]:
                number = workload.ports.get(port.get("port"), port.get("port")) if direction == "in" else port.get("port")
                suffix = f"/{port['protocol']}" if "protocol" in port else ""
                yield Opening(direction, workload.name, peer, f"{number}{suffix}")


def _outside(peer: Mapping[str, Any]) -> str | None:
    """A peer that is not pods of the namespace, in words; None: it is."""
    if not peer:
        return "anyone"
    if "ipBlock" in peer:
        return "any address" if _takes_pods(peer["ipBlock"]) else "the internet"
    if "namespaceSelector" not in peer:
        return None
    labels = dict(peer["namespaceSelector"].get("matchLabels") or {})
    name = labels.get("kubernetes.io/metadata.name", "any")
    pods = (peer.get("podSelector") or {}).get("matchLabels") or {}
    return f"namespace {name}" + (", pods " + ",".join(f"{key}={value}" for key, value in pods.items()) if pods else "")


def _check_policy(policy: Manifest, cluster: Cluster) -> Iterator[Finding]:
    """A policy selects somebody, says which directions it is of, and names ports that exist."""
    chosen = cluster.selected(policy.spec["podSelector"])
    if not chosen:
        yield policy.wrong("its podSelector takes no pods")
    for direction, (kind, field, peers) in _DIRECTIONS.items():
        rules: Sequence[_Rule] = policy.spec.get(field) or []
        if rules and kind not in _types(policy):
            yield policy.wrong(f"has {field} rules, but {kind} is not among its policyTypes")
        for rule in rules:
            if not rule.get("ports"):
                yield policy.wrong(f"an {field} rule names no ports, which opens all of them")
            if any("podSelector" in peer and "namespaceSelector" not in peer for peer in rule.get(peers) or []):
                yield from _check_rule(policy, rule, chosen if direction == "in" else None, peers, cluster)


def _check_rule(policy: Manifest, rule: _Rule, targets: Sequence[Workload] | None, peers: str, cluster: Cluster) -> Iterator[Finding]:
    selected = []
    for peer in rule[peers]:
        found = cluster.selected(peer["podSelector"]) if "podSelector" in peer and "namespaceSelector" not in peer else []
        if not found and "podSelector" in peer and "namespaceSelector" not in peer:
            yield policy.wrong(f"the peer {peer['podSelector']} takes no pods")
        selected += found
    for port in rule.get("ports") or []:
        for workload in targets if targets is not None else selected:
            if port.get("port") is not None and workload.port(port["port"]) is None:
                yield policy.wrong(f"port {port['port']} is not declared by {workload}")


def _passes(direction: str, own: Workload, other: Workload, port: int, cluster: Cluster) -> bool:
    """Whether the policies of `own` let a connection in this direction pass; `port` is the target's."""
    policies = [policy for policy in cluster.of("NetworkPolicy") if _DIRECTIONS[direction][0] in _types(policy) and _selects(policy, own)]
    target = own if direction == "in" else other
    rules = [rule for policy in policies for rule in _rules(policy, direction)]
    return not policies or any(
        _takes(rule.get(_DIRECTIONS[direction][2]), other) and _on(rule.get("ports"), target, port) for rule in rules
    )


def _rules(policy: Manifest, direction: str) -> Sequence[_Rule]:
    kind, field, _ = _DIRECTIONS[direction]
    return (policy.spec.get(field) or []) if kind in _types(policy) else []


def _types(policy: Manifest) -> Sequence[str]:
    """Its directions; where they are not named, Ingress, and Egress if it has such rules."""
    return policy.spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in policy.spec else [])]


def _selects(policy: Manifest, workload: Workload) -> bool:
    return matches(policy.spec["podSelector"], workload.pod_labels)


def _takes(peers: Sequence[Mapping[str, Any]] | None, pod: Workload) -> bool:
    """Whether one of a rule's peers is this pod; no peers: everybody is."""
    return not peers or any(_is(peer, pod) for peer in peers)


def _is(peer: Mapping[str, Any], pod: Workload) -> bool:
    if "ipBlock" in peer:
        return _takes_pods(peer["ipBlock"])
    if "namespaceSelector" in peer and not matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": pod.namespace}):
        return False
    return matches(peer.get("podSelector") or {}, pod.pod_labels)


def _on(ports: Sequence[Mapping[str, Any]] | None, target: Workload, port: int) -> bool:
    """Whether one of a rule's ports is this TCP port of the target; no ports: all are."""
    return not ports or any(
        item.get("protocol", "TCP") == "TCP" and (item.get("port") is None or _number(item["port"], target) == port) for item in ports
    )


def _number(port: str | int, target: Workload) -> int | None:
    return target.ports.get(port) if isinstance(port, str) else port


def _takes_pods(block: Mapping[str, Any]) -> bool:
    """Whether a block of addresses may hold pods' own; of IPv6, where pods may have public ones, every block may."""
    if ":" in block["cidr"]:
        return True
    taken, spared = ipaddress.IPv4Network(block["cidr"]), [ipaddress.IPv4Network(cidr) for cidr in block.get("except") or []]
    return any(part.overlaps(taken) and not any(part.subnet_of(other) for other in spared) for part in _PRIVATE)
