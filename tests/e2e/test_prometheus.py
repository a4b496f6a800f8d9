"""The real Prometheus, with the project's own configuration, scrapes a whole mesh behind a real Envoy: every panel of the dashboard, every
variable of it and every alert has data there, and a latency leads to the trace of a request.

What is asked for is asked until it is there: a scrape that a busy machine missed is made up for by the next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from tests.support.envoy import Envoy, running_envoy
from tests.support.mesh import Mesh, sse
from tests.support.prometheus import FOLDER, Prometheus, running_prometheus
from tools.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
DASHBOARD = json.loads((FOLDER.parent / "grafana" / "dashboards" / "tokenloom.json").read_text())
RULES = yaml.safe_load((FOLDER / "rules" / "tokenloom.yml").read_text())
# As Grafana replaces them where nobody chose: all models and instances. Rates look back far enough to see the traffic however busy the
# machine is in between.
GRAFANA = {"$__rate_interval": "10m", "$model": ".+", "$instance": ".+"}
# Runs nowhere here; that it is down is data for the panel and the alert about targets.
AWAY = "otel-collector"
SERVICES = ("gateway", "scheduler", "worker", "tokenizer")
PROMPT = "The prefix cache keeps blocks of sixteen tokens, and this text is longer than a few of them."


@dataclass(slots=True)
class Watched:
    """A mesh, Envoy before it, Prometheus beside it, and the trace ids of the requests that it answered."""

    mesh: Mesh
    envoy: Envoy
    prometheus: Prometheus
    trace_ids: set[str] = field(default_factory=set)

    async def ask(self, client: httpx.AsyncClient, **fields: Any) -> None:
        """A request that is answered."""
        body = {"model": self.mesh.model, "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, **fields}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            self.trace_ids.add(response.headers["traceparent"].split("-")[1])
            if fields.get("stream"):
                assert [chunk async for chunk in sse(response)]
            else:
                await response.aread()

    async def leave(self, client: httpx.AsyncClient) -> None:
        """Leaves streams after their first chunk until one was cancelled while its blocks were in a step."""
        freed = "tokenloom:cancel_to_free_seconds_count"
        for _ in range(50):
            body = {"model": self.mesh.model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                self.trace_ids.add(response.headers["traceparent"].split("-")[1])
                await anext(response.aiter_lines())
            await self.mesh.settle()
            if self.mesh.metrics("scheduler")[freed]:
                return
        raise AssertionError("every request was over before its client left")

    async def drive(self) -> None:
        """Traffic of every kind."""
        async with self.mesh.client() as direct, self.envoy.client() as edge:
            for client, stream in itertools.product((direct, edge), (False, True)):
                await self.ask(client, stream=stream)
            assert (await direct.post("/v1/completions", json={"model": self.mesh.model, "prompt": 7.5})).status_code == 400
            await self.leave(direct)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> AsyncIterator[Watched]:
    """Scraped before and after the traffic, so that rates have something to count."""
    folder = tmp_path_factory.mktemp("prometheus")
    mesh = await asyncio.to_thread(Mesh.start, folder, model=str(tiny_llama_dir))
    try:
        async with running_envoy(folder, [mesh.port], [free_port()]) as envoy:
            ports = {service: httpx.URL(mesh.metrics_url(service)).port or 0 for service in SERVICES}
            ports |= {"envoy": envoy.ports["stats"], AWAY: free_port()}
            async with running_prometheus(folder, ports) as prometheus:
                await envoy.until_healthy("gateway", 1)
                seen = Watched(mesh, envoy, prometheus)
                await prometheus.until("up == 1", lambda found: len(found) == len(ports))  # all but the one that is away, and itself
                await seen.drive()
                yield seen
    finally:
        assert await asyncio.to_thread(mesh.stop) == 0


def substituted(expression: str) -> str:
    """An expression as Grafana sends it."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, f"a variable that this test does not know: {expression}"
    return expression


def targets() -> Iterator[Any]:
    """Every query of every panel."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")


def alerts() -> Iterator[Any]:
    """What each alert compares: its expression without the last line, which is the comparison."""
    for rule in (rule for group in RULES["groups"] for rule in group["rules"]):
        value, comparison = rule["expr"].rstrip().rsplit("\n", 1)
        assert re.fullmatch(r"[<>] [\d.]+", comparison), f"{rule['alert']} does not end with its comparison"
        yield pytest.param(value, id=rule["alert"])


@pytest.mark.parametrize("expression", [*targets()])
async def test_every_panel_has_data(watched: Watched, expression: str) -> None:
    await watched.prometheus.until(substituted(expression))


@pytest.mark.parametrize("value", [*alerts()])
async def test_every_alert_compares_something(watched: Watched, value: str) -> None:
    await watched.prometheus.until(value)


async def test_every_rule_is_evaluated_without_error(watched: Watched) -> None:
    deadline = time.monotonic() + 60
    while True:
        groups = (await watched.prometheus.get("rules"))["groups"]
        rules = {rule["name"]: (rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}
        if rules and all(health == "ok" for health, _ in rules.values()):
            break
        assert time.monotonic() < deadline, rules
        await asyncio.sleep(0.1)
    assert len(rules) == len(list(alerts()))


@pytest.mark.parametrize(
    "variable", [entry for entry in DASHBOARD["templating"]["list"] if entry["type"] == "query"], ids=lambda entry: entry["name"]
)
async def test_every_variable_offers_something(watched: Watched, variable: dict[str, Any]) -> None:
    selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()
    await watched.prometheus.until(selector)
    assert await watched.prometheus.get(f"label/{label}/values", **{"match[]": selector})


@pytest.mark.parametrize(
    "metric",
    [
        'time_to_first_token_seconds_bucket{job="gateway"}',
        'time_per_output_token_seconds_bucket{job="gateway"}',
        'e2e_request_latency_seconds_bucket{job="gateway"}',
        'request_queue_time_seconds_bucket{job="scheduler"}',
    ],
)
async def test_a_latency_leads_to_the_trace_of_a_request(watched: Watched, metric: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        span = {"start": str(time.time() - 300), "end": str(time.time() + 60)}
        found = await watched.prometheus.get("query_exemplars", query=f"tokenloom:{metric}", **span)
        ids = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
        if ids & watched.trace_ids:
            return
        assert time.monotonic() < deadline, f"{metric}: {ids}; the requests' are {watched.trace_ids}"
        await asyncio.sleep(0.1)


async def test_the_sums_of_requests_agree_at_every_scrape(watched: Watched) -> None:
    admitted = await watched.prometheus.until('sum(tokenloom:requests_admitted_total{job="scheduler"})', lambda found: found[:1] > [4])
    ended = await watched.prometheus.values('sum({__name__=~"tokenloom:requests_(finished|failed|cancelled)_total", job="scheduler"})')
    live = await watched.prometheus.values('sum(tokenloom:num_requests_live{job="scheduler"})')
    assert admitted == [ended[0] + live[0]]


async def test_births_of_counters_are_not_kept(watched: Watched) -> None:
    assert any("_created" in name for name in watched.mesh.metrics("gateway"))
    await watched.prometheus.until('count({__name__=~"tokenloom:.+", job="gateway"})')
    assert await watched.prometheus.values('count({__name__=~"tokenloom:.+_created"})') == []
