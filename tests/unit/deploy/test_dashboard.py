"""Grafana's files: the dashboard is what its source says, lies well on the grid, and fits the data sources beside it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.errors import ErrorCode
from tools.dashboard.grafana import GRID, ROWS, dashboard, text
from tools.dashboard.panels import Kind, Panel, Query, Row

DEPLOY = Path(__file__).parents[3] / "deploy"
GRAFANA = DEPLOY / "grafana"
FILE = GRAFANA / "dashboards" / "tokenloom.json"
DASHBOARD = json.loads(FILE.read_text())
SOURCES = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "tokenloom.yml").read_text())["datasources"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
COMPOSE = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_file_is_as_new_as_its_source():
    assert FILE.read_text() == text(), "run: .venv/bin/python -m tools.dashboard > deploy/grafana/dashboards/tokenloom.json"


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The cells of the grid that a panel covers."""
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    return set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))


def test_no_two_panels_overlap_and_none_leaves_the_grid():
    covered: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        found = cells(panel)
        assert not covered & found, panel["title"]
        assert {column for column, _ in found} <= set(range(GRID)), panel["title"]
        covered |= found


def test_the_rows_follow_each_other_without_a_gap():
    lines = {line for panel in DASHBOARD["panels"] for _, line in cells(panel)}
    assert lines == set(range(max(lines) + 1))


def test_a_panel_that_does_not_fit_begins_a_new_line_below_the_tallest():
    panels = tuple(
        Panel(str(number), "", (Query("1"),), kind=kind, width=10) for number, kind in enumerate((Kind.STAT, Kind.LINES, Kind.STAT))
    )
    places = [panel["gridPos"] for panel in dashboard([Row("row", panels)])["panels"]]
    assert [(place["x"], place["y"]) for place in places] == [(0, 0), (0, 1), (10, 1), (0, 9)]


def test_ids_are_unique_and_titles_are_unique_within_a_row():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for row in ROWS:
        titles = [panel.title for panel in row.panels]
        assert len(titles) == len(set(titles)), row.title


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows_and_has_queries(panel: dict[str, Any]):
    assert len(panel["description"]) > 20
    assert panel["targets"]
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_of_our_metrics_names_the_job(expression: str):
    # Gateway and scheduler have metrics of one name and different meaning.
    for selector in re.findall(r"tokenloom:\w+(\{[^}]*\})?", expression):
        assert "job=" in selector, expression


def test_series_that_stay_at_zero_do_not_fill_the_legend():
    # Every error and every reason has one from the start.
    for panel in PANELS:
        hidden = [entry["matcher"]["options"]["reducer"] for entry in panel["fieldConfig"]["overrides"]]
        assert hidden == ([] if panel["type"] == "stat" else ["allIsZero"]), panel["title"]


def test_failures_are_the_errors_that_are_not_the_client_s():
    (failed,) = [target["expr"] for panel in PANELS if panel["title"] == "Failed requests" for target in panel["targets"]]
    (reasons,) = re.findall(r'reason=~"([^"]+)"', failed)
    assert set(reasons.split("|")) == {code.spec.label for code in ErrorCode if code.spec.http_status >= 500}


def test_an_exemplar_leads_to_the_trace_in_the_other_data_source():
    by_uid = {source["uid"]: source for source in SOURCES}
    (destination,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"  # libs/telemetry/metrics.py
    assert by_uid[destination["datasourceUid"]]["type"] == "jaeger"
    assert any(target["exemplar"] for panel in PANELS for target in panel["targets"])


def test_rates_look_back_over_scrapes_as_often_as_prometheus_makes_them():
    (source,) = [source for source in SOURCES if source["type"] == "prometheus"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_the_dashboard_opens_with_the_provisioned_data_source():
    (variable,) = [entry for entry in DASHBOARD["templating"]["list"] if entry["type"] == "datasource"]
    assert variable["current"]["value"] in {source["uid"] for source in SOURCES}
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}


def test_compose_mounts_the_files_where_they_look_for_each_other():
    mounts = dict(reversed(volume.split(":")[:2]) for volume in COMPOSE["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "tokenloom.yml").read_text())["providers"][0]
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert (
        COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        == f"{provider['options']['path']}/{FILE.name}"
    )
    names = {source["url"].removeprefix("http://").split(":")[0] for source in SOURCES}
    assert names <= set(COMPOSE["services"])
