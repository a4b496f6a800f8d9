"""Makes Grafana's dashboard of the panels beside this file.

Grafana's JSON repeats for every panel what is the same in all of them, and places by hand what can be placed by counting. Here both are
derived, so that a panel is its title, its queries and what to do about it. A test fails while the file is older than its source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tools.dashboard.clients import OVERVIEW, REQUESTS
from tools.dashboard.panels import Kind, Panel, Query, Row
from tools.dashboard.scheduling import SCHEDULING
from tools.dashboard.services import ENVOY, PROCESSES, TOKENIZING, WORKING

ROWS = (OVERVIEW, REQUESTS, SCHEDULING, WORKING, TOKENIZING, ENVOY, PROCESSES)
UID = "tokenloom"
# Grafana's grid is 24 columns wide; heights are in its units of 30 pixels.
GRID = 24
_HEIGHTS = {Kind.STAT: 4, Kind.LINES: 8, Kind.STACKED: 8, Kind.STATES: 8}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(rows: Sequence[Row]) -> dict[str, Any]:
    """The dashboard as Grafana 11 to 13 load it (the classic model)."""
    return {
        "uid": UID,
        "title": "Tokenloom",
        "description": "What the mesh does, where the time of requests goes, and what each service has to do with it.",
        "tags": ["tokenloom"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": [_alerts()]},
        "links": [],
        "templating": {"list": [_datasource_variable(), *_variables()]},
        "panels": list(_place(rows)),
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Tokenloom.+", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "step": "15s",
    }


def _datasource_variable() -> dict[str, Any]:
    current = {"selected": True, "text": "Prometheus", "value": "prometheus"}
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": current, "hide": 0}


def _variables() -> Iterator[dict[str, Any]]:
    for name, label, query in (
        ("model", "Model", "label_values(tokenloom:e2e_request_latency_seconds_count, model_name)"),
        ("instance", "Instance", 'label_values(up{job=~"gateway|tokenizer|scheduler|worker|envoy"}, instance)'),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _place(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, as many as are as wide as the grid, below the title of their row."""
    number, top = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": GRID, "h": 1},
            "panels": [],
        }
        number, top, left, height = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > GRID:
                top, left, height = top + height, 0, 0
            tall = _HEIGHTS[panel.kind]
            yield {"id": number, "gridPos": {"x": left, "y": top, "w": panel.width, "h": tall}, **_panel(panel)}
            number, left, height = number + 1, left + panel.width, max(height, tall)
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    is_stat = panel.kind is Kind.STAT
    return {
        "type": "stat" if is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": [] if is_stat else [_without_zeros()]},
        "options": _stat_options() if is_stat else _series_options(),
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
    }


def _field(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for color, value in zip(("orange", "red"), panel.thresholds, strict=False)]
    field: dict[str, Any] = {"unit": panel.unit, "min": panel.least, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind is Kind.STAT:
        return field | {"color": {"mode": "thresholds"}}
    stacked = panel.kind is not Kind.LINES
    return field | {
        "color": {"mode": "palette-classic"},
        "custom": {
            "drawStyle": "line",
            "lineInterpolation": "stepAfter" if panel.kind is Kind.STATES else "linear",
            "lineWidth": 1,
            "fillOpacity": 40 if stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        },
    }


def _without_zeros() -> dict[str, Any]:
    """Leaves out of the legend what was zero all the time: series of all reasons and errors exist from the start."""
    hidden = {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": True, "viz": False}}
    return {"matcher": {"id": "byValue", "options": {"op": "gte", "reducer": "allIsZero", "value": 0}}, "properties": [hidden]}


def _stat_options() -> dict[str, Any]:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
    }


def _series_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(query: Query, index: int, panel: Panel) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or panel.title,
        "range": True,
        "instant": False,
        "exemplar": query.exemplars,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(ROWS), indent=1, ensure_ascii=False) + "\n"
