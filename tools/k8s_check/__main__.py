"""`python -m tools.k8s_check`: renders and checks every overlay, alone and with every component; 1 when something is wrong."""

from __future__ import annotations

import sys

from tools.k8s_check.manifests import Cluster
from tools.k8s_check.rendering import render, variants
from tools.k8s_check.rules import check


def main() -> int:
    """Prints what is wrong with which variant."""
    checked = wrong = 0
    for variant in variants():
        cluster = Cluster.parse(render(variant))
        findings = check(cluster)
        checked, wrong = checked + 1, wrong + len(findings)
        for finding in findings:
            print(f"error: {variant}: {finding}")
    print(f"k8s: {checked} variants of the overlays, {wrong} problems")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
