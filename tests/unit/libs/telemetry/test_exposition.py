"""Metrics leave in two formats under one name, and only where somebody can follow them do they carry exemplars."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from libs.telemetry.metrics import exposition, new_registry, serve_metrics, trace_exemplar
from tools.ports import free_port

OPENMETRICS = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5"
TRACE = 0x0AF7651916CD43DD8448EB211C80319C


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = new_registry()
    Counter("tokenloom:things", "Things.", ["kind"], registry=registry).labels("a").inc()
    Gauge("tokenloom:level", "Level.", registry=registry).set(3)
    Histogram("tokenloom:iteration_tokens_total", "A histogram whose name ends like a counter's.", registry=registry).observe(2)
    Histogram("tokenloom:wait_seconds", "Wait.", registry=registry).observe(0.3, trace_exemplar(TRACE, recorded=True))
    return registry


def names(families) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def test_both_formats_use_the_same_names_colons_included(registry: CollectorRegistry):
    text, text_type = exposition(registry, "*/*")
    openmetrics, openmetrics_type = exposition(registry, OPENMETRICS)
    assert text_type.startswith("text/plain")
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert names(read_text(text.decode())) == names(read_openmetrics(openmetrics.decode()))
    assert {"tokenloom:things_total", "tokenloom:level", "tokenloom:iteration_tokens_total_bucket"} <= names(read_text(text.decode()))


def test_openmetrics_names_its_samples_as_its_types(registry: CollectorRegistry):
    # The parser would take a sample without a TYPE line of its name for a family of its own, of unknown type.
    families = list(read_openmetrics(exposition(registry, OPENMETRICS)[0].decode()))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}


def test_only_openmetrics_carries_exemplars(registry: CollectorRegistry):
    assert b"0af7651916cd43dd8448eb211c80319c" not in exposition(registry, "")[0]
    samples = [sample for family in read_openmetrics(exposition(registry, OPENMETRICS)[0].decode()) for sample in family.samples]
    (found,) = [sample.exemplar for sample in samples if sample.exemplar]
    assert found.labels == {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    assert found.value == 0.3


def test_a_trace_that_nobody_records_is_no_exemplar():
    assert trace_exemplar(TRACE, recorded=False) is None


def test_every_service_says_what_its_process_uses():
    found = names(read_text(exposition(new_registry(), "")[0].decode()))
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"} <= found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_endpoint_answers_in_the_format_that_is_asked_for(registry: CollectorRegistry, host: str):
    port = free_port()
    serve_metrics(registry, host, port)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for accept, expected in (("", "text/plain"), (OPENMETRICS, "application/openmetrics-text")):
        request = urllib.request.Request(f"http://{host}:{port}/metrics", headers={"Accept": accept})
        with opener.open(request, timeout=10) as response:
            assert response.headers["content-type"].startswith(expected)
            assert b"tokenloom:things_total" in response.read()


def test_port_0_serves_nothing_and_a_taken_port_is_an_error(registry: CollectorRegistry):
    serve_metrics(registry, "127.0.0.1", 0)
    port = free_port()
    serve_metrics(registry, "127.0.0.1", port)
    with pytest.raises(OSError):
        serve_metrics(registry, "127.0.0.1", port)
