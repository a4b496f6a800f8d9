"""Writes docs/metrics.md from what a running mesh serves: `python tools/metrics_doc.py PORT > docs/metrics.md`.

The text of each metric stands beside its code only; tools/smoke.py fails when the page lacks a metric that is served.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

SERVICES = ("gateway", "scheduler", "worker", "tokenizer")
_LINE = re.compile(r"^# (HELP|TYPE) (tokenloom:\S+) (.*)$")
_HEAD = """# Metrics

Every service serves Prometheus text. `tokenloom serve` prints the four addresses: the gateway's is its own port (`/metrics`), the
scheduler, the worker and the tokenizer have the next three ports on loopback where they are free. Names are `tokenloom:` and what
vLLM calls the same thing. Times are in seconds, lengths in tokens. This page is made from the services' own help texts
(`tools/metrics_doc.py`).

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


def render(expositions: dict[str, str]) -> str:
    """The page, for the exposition text of each service."""
    parts = [_HEAD]
    for service, text in expositions.items():
        rows = [f"| `{metric.name}` | {metric.kind} | {metric.help.replace('|', '/')} |" for metric in parse(text)]
        parts.append(
            "\n".join([f"## {service.capitalize()}\n", "| name | kind | what it says, and what to do |", "|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def main(port: int) -> None:
    """Prints the page for the mesh whose gateway listens on `port` and whose services have the next ports."""
    print(render({name: scrape(f"http://127.0.0.1:{port + offset}/metrics") for offset, name in enumerate(SERVICES)}), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]))
