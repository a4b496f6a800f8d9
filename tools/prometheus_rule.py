"""Writes the PrometheusRule of k8s/components/monitoring: deploy/prometheus/rules as the Prometheus operator wants them.

Prometheus refuses a file with anything around its groups, and the operator wants them inside an object: neither reads the other's file, and
kustomize cannot put one into the other. `python -m tools.prometheus_rule` writes, with `--check` it compares (exit code 1: not as new as
the rules).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy/prometheus/rules/tokenloom.yml"
TARGET = ROOT / "k8s/components/monitoring/rules.yaml"
_HEAD = """\
# Made by tools/prometheus_rule.py from deploy/prometheus/rules/tokenloom.yml: edit that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tokenloom
  labels: {app.kubernetes.io/part-of: tokenloom}
spec:
"""


def render(rules: str) -> str:
    """The object that holds the groups of a rule file, comments included."""
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in rules.splitlines())


def main(arguments: list[str]) -> int:
    """Writes the object, or with --check compares it."""
    text = render(RULES.read_text())
    if "--check" not in arguments:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        print(f"error: {TARGET.relative_to(ROOT)} is not made of today's rules: python -m tools.prometheus_rule")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
