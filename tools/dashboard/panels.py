"""The panels of Grafana's dashboard: what each shows, and what to do about it.

Gateway and scheduler have metrics of one name (a gateway counts what clients asked for, the scheduler what runs): every query names the
job. `$model` and `$instance` choose all unless somebody looks closer; `$__rate_interval` is Grafana's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from libs.errors import ErrorCode

GATEWAY = 'job="gateway", instance=~"$instance"'
MODEL = f'{GATEWAY}, model_name=~"$model"'
SCHEDULER = 'job="scheduler", instance=~"$instance"'
WORKER = 'job="worker", instance=~"$instance"'
TOKENIZER = 'job="tokenizer", instance=~"$instance"'
SERVICES = 'job=~"gateway|tokenizer|scheduler|worker"'
GENERATING = 'path=~"/v1/(chat/)?completions"'
# The labels of errors that are the mesh's fault: derived, so that a new one is in all panels.
FAILURES = 'reason=~"' + "|".join(code.spec.label for code in ErrorCode if code.spec.http_status >= 500) + '"'
UPSTREAMS = 'envoy_cluster_name=~"gateway|tokenizer"'


class Kind(enum.Enum):
    """How a panel draws: one number, lines, areas that add up, or those of what changes in steps."""

    STAT = "stat"
    LINES = "lines"
    STACKED = "stacked"
    STATES = "states"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and Grafana's template of its series' names (empty: the panel's title)."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's name of one; `thresholds`: where it turns orange, then red; `width` in the grid's 24 columns."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8
    thresholds: tuple[float, ...] = ()
    least: float | None = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A title and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str, where: str) -> str:
    """Events a second, summed over all but the labels `by`."""
    return f"sum by ({by}) (rate(tokenloom:{metric}{{{where}}}[$__rate_interval]))"


def mean(metric: str, where: str) -> str:
    """Mean of a histogram's recent observations."""
    parts = (f"sum(rate(tokenloom:{metric}_{part}{{{where}}}[$__rate_interval]))" for part in ("sum", "count"))
    return " / ".join(parts)


def quantiles(metric: str, where: str, *, exemplars: bool = False) -> tuple[Query, ...]:
    """Median, 90th and 99th percentile of a histogram's recent observations over all instances."""
    buckets = f"sum by (le) (rate(tokenloom:{metric}_bucket{{{where}}}[$__rate_interval]))"
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", name, exemplars) for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def stat(title: str, description: str, expr: str, unit: str = "short", thresholds: tuple[float, ...] = ()) -> Panel:
    """One number of the first look."""
    return Panel(title, description, (Query(expr),), unit, Kind.STAT, width=3, thresholds=thresholds)


def percentiles(title: str, description: str, metric: str, where: str, *, exemplars: bool = False) -> Panel:
    """The panel of a duration's distribution."""
    return Panel(title, description, quantiles(metric, where, exemplars=exemplars), "s")
