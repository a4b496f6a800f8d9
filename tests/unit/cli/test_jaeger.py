"""`tokenloom trace --jaeger`: a request's trace out of a Jaeger's answers."""

from __future__ import annotations

import json

import httpx
import pytest
from typer.testing import CliRunner

from cli import trace as trace_command
from cli.jaeger import JaegerReader
from cli.main import app
from libs.telemetry.trace_store import StoredEvent, TraceStoreError

TRACE, OTHER = "ab" * 16, "cd" * 16


def tag(key: str, value: object) -> dict:
    return {"key": key, "type": "string", "value": value}


def a_span(number: int, parent: int, name: str, process: str, start_us: int, us: int, *tags: dict, logs: tuple = (), trace: str = TRACE):
    references = [{"refType": "CHILD_OF", "traceID": trace, "spanID": f"{parent:016x}"}] if parent else []
    return {
        "traceID": trace,
        "spanID": f"{number:016x}",
        "operationName": name,
        "references": references,
        "startTime": 1_700_000_000_000_000 + start_us,
        "duration": us,
        "tags": list(tags),
        "logs": list(logs),
        "processID": process,
    }


def a_trace(trace: str = TRACE, label: str = "mine", start_us: int = 0) -> dict:
    first = {"timestamp": 1_700_000_000_020_000, "fields": [tag("event", "chunk"), tag("tokenloom.tokens", 32)]}
    names = (tag("tokenloom.x_request_id", label), tag("tokenloom.request_id", '["a:1", "a:2"]'))
    root = a_span(1, 0, "POST /v1/completions", "p1", start_us, 100_000, tag("span.kind", "server"), *names, trace=trace)
    child = a_span(
        2, 1, "decode", "p2", start_us + 10_000, 80_000, {"key": "error", "type": "bool", "value": True},
        tag("otel.status_code", "ERROR"), tag("otel.status_description", "no worker"), logs=(first,), trace=trace,
    )  # fmt: skip
    processes = {
        "p1": {"serviceName": "tokenloom-gateway", "tags": [tag("service.instance.id", "gateway-7")]},
        "p2": {"serviceName": "tokenloom-scheduler", "tags": []},
    }
    return {"traceID": trace, "spans": [root, child], "processes": processes}


class Jaeger:
    """Jaeger's query API over given traces. It heeds no tags, as some backends do not."""

    def __init__(self, *traces: dict) -> None:
        self.traces, self.asked = traces, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url)
        if request.url.path == "/api/services":
            return httpx.Response(200, json={"data": ["jaeger", "tokenloom-gateway", "tokenloom-worker"]})
        if request.url.path == "/api/traces":
            return httpx.Response(200, json={"data": list(self.traces)})
        found = [trace for trace in self.traces if request.url.path == f"/api/traces/{trace['traceID']}"]
        return httpx.Response(200 if found else 404, json={"data": found or None, "errors": [] if found else [{"code": 404}]})


def reader_of(*traces: dict) -> tuple[JaegerReader, Jaeger]:
    jaeger = Jaeger(*traces)
    return JaegerReader("http://jaeger:16686/", transport=httpx.MockTransport(jaeger)), jaeger


def test_a_request_is_found_by_its_tags_at_the_gateway_alone():
    reader, jaeger = reader_of(a_trace(), a_trace(OTHER, "another"))
    assert reader.find("mine") == [TRACE]
    searches = [url.params for url in jaeger.asked if url.path == "/api/traces"]
    assert {search["service"] for search in searches} == {"tokenloom-gateway"}
    assert [json.loads(search["tags"]) for search in searches] == [
        {"tokenloom.request_id": "mine"},
        {"tokenloom.x_request_id": "mine"},
        {"gen_ai.response.id": "mine"},
    ]


def test_a_trace_id_needs_no_search():
    reader, jaeger = reader_of(a_trace())
    assert reader.find(TRACE.upper()) == [TRACE]
    assert [url.path for url in jaeger.asked] == [f"/api/traces/{TRACE}"]


def test_the_newest_of_several_comes_first():
    reader, _ = reader_of(a_trace(), a_trace(OTHER, start_us=5_000_000))
    assert reader.find("mine") == [OTHER, TRACE]
    assert reader.find("nobody") == []


def test_spans_are_those_that_the_built_in_store_would_hold():
    reader, _ = reader_of(a_trace())
    (found,) = reader.find("a:2")
    root, child = reader.spans(found)
    assert (root.name, root.kind, root.service, root.instance, root.parent_id) == (
        "POST /v1/completions", "server", "tokenloom-gateway", "gateway-7", "",
    )  # fmt: skip
    assert root.request_ids() == ["a:1", "a:2", "mine"]
    assert (child.parent_id, child.error, child.attributes, child.kind) == (root.span_id, "no worker", {}, "internal")
    assert (child.start_ns - root.start_ns, child.end_ns - child.start_ns) == (10_000_000, 80_000_000)
    assert child.events == (StoredEvent("chunk", 1_700_000_000_020_000_000, {"tokenloom.tokens": 32}),)


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, text="<html>"), httpx.Response(200, json=[])])
def test_a_jaeger_that_answers_nonsense_is_one_line(answer):
    reader = JaegerReader("http://jaeger", transport=httpx.MockTransport(lambda _: answer))
    with pytest.raises(TraceStoreError, match="does not answer"):
        reader.find("mine")


def test_a_url_without_a_scheme_is_refused():
    with pytest.raises(TraceStoreError, match="--jaeger localhost:16686: must be"):
        JaegerReader("localhost:16686")


@pytest.mark.parametrize("by", ["flag", "JAEGER", "TOKENLOOM_JAEGER"])
def test_the_command_asks_the_jaeger_it_is_told_and_draws_the_waterfall(monkeypatch, tmp_path, by):
    monkeypatch.setattr(trace_command, "JaegerReader", lambda url: reader_of(a_trace())[0])
    args = ["trace", "mine", "--svg", str(tmp_path / "trace.svg")]
    if by == "flag":
        args.append("--jaeger=http://jaeger:16686")
    else:
        monkeypatch.setenv(by, "http://jaeger:16686")
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.output) == (0, "")
    picture = (tmp_path / "trace.svg").read_text()
    assert picture.startswith("<svg")
    assert all(word in picture for word in ("POST&#160;/v1/completions", "decode", "scheduler", "no&#160;worker"))


def test_a_trace_that_the_jaeger_does_not_have_is_explained(monkeypatch):
    monkeypatch.setattr(trace_command, "JAEGER_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(trace_command, "JaegerReader", lambda url: reader_of()[0])
    result = CliRunner().invoke(app, ["trace", "gone", "--jaeger", "http://jaeger:16686"])
    assert result.exit_code == 1
    assert "no trace of 'gone' in the Jaeger at http://jaeger:16686: not kept by the collector's policy" in result.stderr


def test_what_is_no_url_of_a_jaeger_is_wrong_usage():
    result = CliRunner().invoke(app, ["trace", "gone", "--jaeger", "localhost:16686"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must be the http:// or https:// URL" in result.stderr
