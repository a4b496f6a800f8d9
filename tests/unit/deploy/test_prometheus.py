"""Prometheus's files are valid, name what is deployed, and every alert is shown firing and silent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.errors import ErrorCode
from tests.support.binaries import need
from tests.support.prometheus import CONFIG, FOLDER, load

ROOT = FOLDER.parents[1]
RULES = FOLDER / "rules" / "tokenloom.yml"
CASES = FOLDER / "tests" / "tokenloom.test.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
JOBS = {job["job_name"]: job for job in load()["scrape_configs"]}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PODS = list(yaml.safe_load_all((ROOT / "k8s" / "components" / "monitoring" / "pod-monitors.yaml").read_text()))


@pytest.mark.parametrize(
    "command", [["check", "config", str(CONFIG)], ["check", "rules", str(RULES)], ["test", "rules", str(CASES)]], ids=" ".join
)
def test_promtool_accepts(command: list[str]):
    done = subprocess.run([need("promtool", install="apt-get install prometheus"), *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_shown_firing_and_silent():
    shown = [case["name"] for case in yaml.safe_load(CASES.read_text())["tests"]]
    assert sorted(shown) == sorted(f"{rule['alert']} {how}" for rule in ALERTS for how in ("fires", "is silent"))


def test_a_case_looks_at_the_alert_that_it_names():
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        alert, how = case["name"].split(" ", 1)
        (test,) = case["promql_expr_test"]
        assert f'alertname="{alert}"' in test["expr"], case["name"]
        assert bool(test["exp_samples"]) == (how == "fires"), case["name"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_so_and_what_to_do(rule: dict[str, Any]):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, anchor = rule["annotations"]["runbook"].split("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_names_the_job_of_our_metrics(rule: dict[str, Any]):
    for selector in re.findall(r"tokenloom:\w+(\{[^}]*\})?", rule["expr"]):
        assert "job=" in selector


def test_failing_requests_are_those_of_the_error_table():
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "TokenloomRequestsFail"]
    (reasons,) = re.findall(r'reason=~"([^"]+)"', rule["expr"])
    assert set(reasons.split("|")) == {code.spec.label for code in ErrorCode if code.spec.http_status >= 500}


def test_jobs_that_rules_name_are_scraped():
    named = {job for rule in ALERTS for value in re.findall(r'job=~?"([^"]+)"', rule["expr"]) for job in value.split("|")}
    assert named <= set(JOBS)


def test_every_job_finds_its_service_by_the_name_that_compose_gives_it():
    for name, job in JOBS.items():
        for found in job.get("dns_sd_configs", []):
            assert found["names"] == [name]
            assert found["type"] == "A"
            assert name in COMPOSE


def test_kubernetes_scrapes_the_same_jobs_and_keeps_the_same_series():
    for monitor in PODS:
        job = JOBS[monitor["metadata"]["name"]]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == job.get("metrics_path", "/metrics")
        ours = [(rule["source_labels"], rule["regex"], rule["action"]) for rule in job["metric_relabel_configs"]]
        theirs = [(rule["sourceLabels"], rule["regex"], rule["action"]) for rule in endpoint["metricRelabelings"]]
        assert ours == theirs, monitor["metadata"]["name"]


def test_compose_keeps_exemplars():
    assert "--enable-feature=exemplar-storage" in COMPOSE["prometheus"]["command"]
