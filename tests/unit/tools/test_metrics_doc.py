"""The page of metrics: what the services say of theirs, and which alert watches it."""

from __future__ import annotations

from tools.metrics_doc import RULES, alerts, parse, render

EXPOSITION = """# HELP tokenloom:wait_seconds How long. High | low: act.
# TYPE tokenloom:wait_seconds histogram
tokenloom:wait_seconds_bucket{le="+Inf"} 1.0
# HELP tokenloom:wait_seconds_created How long.
# TYPE tokenloom:wait_seconds_created gauge
tokenloom:wait_seconds_created 1.0
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 5.0
"""
ONE_RULE = """
groups:
  - name: all
    rules:
      - {alert: TooSlow, expr: 'rate(tokenloom:wait_seconds_bucket{job=~"worker|gateway", le="1"}[5m]) > 1'}
      - {alert: Other, expr: 'tokenloom:wait_seconds_of_others{job="gateway"} > 1'}
"""


def test_only_our_own_metrics_are_listed_without_their_births():
    assert [metric.name for metric in parse(EXPOSITION)] == ["tokenloom:wait_seconds"]


def test_a_metric_is_watched_where_an_alert_names_it_for_its_service():
    assert alerts(ONE_RULE, "gateway", "tokenloom:wait_seconds") == ["TooSlow"]
    assert alerts(ONE_RULE, "scheduler", "tokenloom:wait_seconds") == []
    assert alerts(ONE_RULE, "gateway", "tokenloom:wait") == []


def test_a_row_says_what_to_do_and_what_watches_it():
    page = render({"gateway": EXPOSITION}, ONE_RULE)
    row = "| `tokenloom:wait_seconds` | histogram | How long. High / low: act. Watched by [TooSlow](monitoring.md#tooslow). |"
    assert row in page.splitlines()
    assert "## Gateway" in page


def test_the_rules_watch_what_the_services_have():
    rules = RULES.read_text()
    assert alerts(rules, "scheduler", "tokenloom:requests_admitted_total") == ["TokenloomRequestsUnaccounted"]
    assert alerts(rules, "gateway", "tokenloom:time_to_first_token_seconds") == ["TokenloomFirstTokenSlow"]
