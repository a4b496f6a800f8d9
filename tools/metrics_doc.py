"""Writes docs/metrics.md from what a running mesh serves: `python tools/metrics_doc.py PORT > docs/metrics.md`.

The text of each metric stands beside its code only; tools/smoke.py fails when the page lacks a metric that is served. Which alert watches a
metric is read from the rules.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

RULES = Path(__file__).parents[1] / "deploy" / "prometheus" / "rules" / "tokenloom.yml"
SERVICES = ("gateway", "scheduler", "worker", "tokenizer")
_LINE = re.compile(r"^# (HELP|TYPE) (tokenloom:\S+) (.*)$")
_HEAD = """# Metrics

Every service serves Prometheus text. `tokenloom serve` prints the four addresses: the gateway's is its own port (`/metrics`), the
scheduler, the worker and the tokenizer have the next three ports on loopback where they are free. Names are `tokenloom:` and what
vLLM calls the same thing. Times are in seconds, lengths in tokens. This page is made from the services' own help texts
(`tools/metrics_doc.py`). Beside them every service has its process's CPU, memory, open files and start (`process_*`). What watches a metric
is an alert: [monitoring.md](monitoring.md) says what to do when it fires, and how all this is collected and shown.

Where two services have a metric of one name, each counts what it sees: a gateway what clients asked for (a prompt once, whatever its `n`),
the scheduler what it runs (every choice). Choose one by its job; do not sum over services.
"""


@dataclass(frozen=True, slots=True)
class MetricLine:
    """One metric as the exposition text describes it."""

    name: str
    kind: str
    help: str


def parse(text: str) -> Iterator[MetricLine]:
    """The metrics of one exposition, without the `_created` series that accompany counters and histograms."""
    helps: dict[str, str] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            what, name, rest = match.groups()
            if what == "HELP":
                helps[name] = rest
            elif not name.endswith("_created"):
                yield MetricLine(name, rest, helps.get(name, ""))


def scrape(url: str) -> str:
    """The exposition at a URL, without asking a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return str(response.read().decode())


def alerts(rules: str, service: str, metric: str) -> list[str]:
    """The names of the alerts that a metric of a service is watched by, in the rules' order. A histogram is watched by its parts."""
    named = re.compile(rf'{re.escape(metric)}(?:_bucket|_sum|_count)?\{{job=~?"([^"]+)"')
    found = (rule for group in yaml.safe_load(rules)["groups"] for rule in group["rules"])
    return [rule["alert"] for rule in found if any(service in job.split("|") for job in named.findall(rule["expr"]))]


def _row(service: str, metric: MetricLine, rules: str) -> str:
    text = metric.help.replace("|", "/")
    watched = "".join(f" [{name}](monitoring.md#{name.lower()})" for name in alerts(rules, service, metric.name))
    return f"| `{metric.name}` | {metric.kind} | {text}{' Watched by' + watched + '.' if watched else ''} |"


def render(expositions: dict[str, str], rules: str) -> str:
    """The page, for the exposition text of each service and the alerts' rules."""
    parts = [_HEAD]
    for service, text in expositions.items():
        rows = [_row(service, metric, rules) for metric in parse(text)]
        parts.append(
            "\n".join([f"## {service.capitalize()}\n", "| name | kind | what it says, and what to do |", "|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def main(port: int) -> None:
    """Prints the page for the mesh whose gateway listens on `port` and whose services have the next ports."""
    expositions = {name: scrape(f"http://127.0.0.1:{port + offset}/metrics") for offset, name in enumerate(SERVICES)}
    print(render(expositions, RULES.read_text()), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]))
