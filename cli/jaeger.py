"""Traces from a Jaeger query service (its HTTP JSON API): for a mesh whose spans go to a collector, as in compose and on Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from libs.telemetry.trace_store import REQUEST_ID_ATTRIBUTES, StoredEvent, StoredSpan, TraceStoreError

# Seconds for one answer of Jaeger.
TIMEOUT = 10.0
# How far back an id is looked for, and how many traces of one id are looked at. An index over tags is a day's in most installations.
LOOKBACK, MAX_FOUND = "48h", 20
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


class NoAddress(TraceStoreError):
    """What was given is no URL of a Jaeger."""


class JaegerReader:
    """The traces that a Jaeger holds, read as TraceReader reads the built-in store. Raises TraceStoreError."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise NoAddress(f"--jaeger {url}: must be the http:// or https:// URL of Jaeger's page, such as http://localhost:16686")
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT, transport=transport)
        self._traces: dict[str, list[StoredSpan]] = {}

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def find(self, name: str) -> list[str]:
        """The trace ids that `name` (a trace id or any id of a request) stands for, newest first; empty when there is none."""
        as_id = name.lower().replace("-", "")
        self._traces = {}
        if _TRACE_ID.fullmatch(as_id):
            self._take(self._get(f"/api/traces/{as_id}"))
        if not self._traces:
            for service in self._gateways():
                for attribute in REQUEST_ID_ATTRIBUTES:
                    query = {"service": service, "tags": json.dumps({attribute: name}), "lookback": LOOKBACK, "limit": MAX_FOUND}
                    self._take(self._get(f"/api/traces?{urlencode(query)}"), name)
        return sorted(self._traces, key=lambda trace: min(span.start_ns for span in self._traces[trace]), reverse=True)

    def spans(self, trace_id: str) -> list[StoredSpan]:
        """The spans of a trace that `find` found, by start."""
        return sorted(self._traces.get(trace_id, ()), key=lambda span: span.start_ns)

    def _gateways(self) -> list[str]:
        """The services that can be asked for a request's ids: gateways, whatever OTEL_SERVICE_NAME calls them, else all."""
        services = [str(name) for name in self._get("/api/services") or ()]
        return [name for name in services if "gateway" in name] or services

    def _take(self, traces: Sequence[Mapping[str, Any]], name: str = "") -> None:
        """Remembers traces; with a `name`, those that carry it: not every Jaeger heeds the tags it is asked for."""
        for trace in traces or ():
            spans = [_span(span, trace["processes"]) for span in trace["spans"]]
            if spans and (not name or any(name in span.request_ids() for span in spans)):
                self._traces[spans[0].trace_id] = spans

    def _get(self, path: str) -> Any:
        try:
            response = self._client.get(path)
            if response.status_code == 404:
                return []
            return response.raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise TraceStoreError(f"Jaeger at {self._client.base_url} does not answer: {error}") from error


def _span(span: Mapping[str, Any], processes: Mapping[str, Any]) -> StoredSpan:
    tags = {tag["key"]: _value(tag) for tag in span.get("tags", ())}
    process = processes[span["processID"]]
    parents = [reference["spanID"] for reference in span.get("references", ()) if reference.get("refType") == "CHILD_OF"]
    failed = tags.pop("error", False) is True or tags.get("otel.status_code") == "ERROR"
    tags.pop("otel.status_code", None)
    problem = tags.pop("otel.status_description", "")
    start_ns = int(span["startTime"]) * 1000
    return StoredSpan(
        trace_id=str(span["traceID"]).rjust(32, "0"),
        span_id=str(span["spanID"]),
        parent_id=str(parents[0]) if parents else "",
        name=str(span["operationName"]),
        service=str(process["serviceName"]),
        start_ns=start_ns,
        end_ns=start_ns + int(span["duration"]) * 1000,
        kind=str(tags.pop("span.kind", "internal")),
        attributes=tags,
        events=tuple(_event(log) for log in span.get("logs") or ()),
        instance=str(next((tag["value"] for tag in process.get("tags", ()) if tag["key"] == "service.instance.id"), "")),
        error=(problem or "error") if failed else None,
    )


def _event(log: Mapping[str, Any]) -> StoredEvent:
    fields = {field["key"]: _value(field) for field in log["fields"]}
    return StoredEvent(str(fields.pop("event", "event")), int(log["timestamp"]) * 1000, fields)


def _value(tag: Mapping[str, Any]) -> Any:
    """A tag's value; Jaeger tells a list as JSON in a string."""
    value = tag["value"]
    if isinstance(value, str) and value.startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
