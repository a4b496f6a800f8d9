"""All rules, in the order in which one would read their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.k8s_check import admission, operation, pods, references, schemas
from tools.k8s_check.manifests import Cluster, Finding
from tools.k8s_check.network import check_network

Rule = Callable[[Cluster], Iterator[Finding]]

# What the others rely on: they read what fits its schema.
SHAPE: Rule = schemas.check_schemas
RULES: tuple[Rule, ...] = (
    references.check_names,
    references.check_selectors,
    references.check_services,
    references.check_autoscalers,
    references.check_volumes,
    references.check_environment,
    schemas.check_monitors,
    admission.check_admission,
    pods.check_identity,
    pods.check_restricted,
    pods.check_resources,
    pods.check_health,
    pods.check_spread,
    pods.check_images,
    pods.check_scratch,
    operation.check_budgets,
    operation.check_liveness,
    operation.check_claims,
    operation.check_secrecy,
    operation.check_rollout,
    check_network,
)


def check(cluster: Cluster) -> list[Finding]:
    """Everything that is wrong; where shapes are wrong, only they."""
    return list(SHAPE(cluster)) or [finding for rule in RULES for finding in rule(cluster)]
