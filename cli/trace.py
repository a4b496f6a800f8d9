"""`tokenloom trace`: finds one request's trace, in the mesh's built-in store or in a Jaeger, and prints it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from cli.jaeger import JaegerReader, NoAddress
from cli.rundir import candidates
from cli.waterfall import render
from libs.errors import TokenloomError
from libs.telemetry.trace_store import StoredEvent, StoredSpan, TraceReader, TraceStoreError
from libs.telemetry.trace_tree import Gap, SpanNode, build_tree, whole_ns

# Services export twice a second; a request that has just ended may still be on its way.
WAIT_SECONDS = 3.0
# A collector decides seconds after the root's end whether it hands a trace on (deploy/otel/collector.yaml).
JAEGER_WAIT_SECONDS = 10.0
_SETTLE_NS = 1_500_000_000
_POLL_SECONDS = 0.1
# Columns of the picture.
_SVG_WIDTH = 150


class Reader(Protocol):
    """Where traces are kept. Its methods raise TraceStoreError."""

    def find(self, name: str) -> list[str]:
        """The trace ids that `name` stands for, newest first."""
        ...

    def spans(self, trace_id: str) -> list[StoredSpan]:
        """The spans of a trace by start."""
        ...

    def close(self) -> None:
        """Gives up what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class _Source:
    """A reader, what it is called in messages, and how long a trace may take to get there (seconds)."""

    reader: Reader
    name: str
    wait_seconds: float
    hint: str


def main(request_id: str, *, port: int, as_json: bool, jaeger: str = "", svg: Path | None = None) -> int:
    """Prints the trace that `request_id` names, or draws it into the file `svg`. 1 when there is none (what to do is said on stderr), 2 for
    what is no URL of a Jaeger.

    `jaeger` is the URL of a Jaeger to ask instead of the built-in store of the mesh on `port`.
    """
    try:
        source = _jaeger(jaeger) if jaeger else _built_in(port)
        with contextlib.closing(source.reader):
            found = wait_for_trace(source.reader, request_id, source.wait_seconds)
            others = source.reader.find(request_id)[1:]
        if not found:
            return _complain(
                f"no trace of {request_id!r} {source.name}: {source.hint}, not sampled by its traceparent, or not "
                "finished yet. A request is named by its response's `id`, its x-request-id or its trace id."
            )
        if svg is not None:
            svg.write_text(to_svg(found))
    except (TokenloomError, TraceStoreError, OSError) as error:
        return _complain(str(error), 2 if isinstance(error, NoAddress) else 1)
    if as_json:
        print(json.dumps(to_json(found), indent=2))
    elif svg is None:
        _print(found, others)
    return 0


def _built_in(port: int) -> _Source:
    database = next((path for directory in candidates(port) if (path := directory / "traces.db").is_file()), None)
    if database is None:
        raise TraceStoreError(
            f"no mesh has served on port {port} here: {candidates(port)[0]}/traces.db does not exist (choose with --port, or ask a Jaeger "
            "with --jaeger URL)"
        )
    return _Source(
        TraceReader(database), f"on port {port}", WAIT_SECONDS, "not one of the last requests of this mesh, not kept by its policy"
    )


def _jaeger(url: str) -> _Source:
    return _Source(JaegerReader(url), f"in the Jaeger at {url}", JAEGER_WAIT_SECONDS, "not kept by the collector's policy, too old")


def _print(found: list[StoredSpan], others: list[str]) -> None:
    console = Console()
    console.print(render(found, console.width))
    if others:
        console.print(f"[dim]{len(others)} older traces carry this id: {', '.join(others[:5])}[/dim]", highlight=False)


def to_svg(spans: list[StoredSpan]) -> str:
    """The waterfall as a picture."""
    console = Console(width=_SVG_WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(spans, _SVG_WIDTH))
    return console.export_svg(title="tokenloom trace")


def wait_for_trace(reader: Reader, request_id: str, wait_seconds: float) -> list[StoredSpan]:
    """The spans of the newest trace of that name once they are complete, or what there is after `wait_seconds` (nothing: empty)."""
    deadline = time.monotonic() + wait_seconds
    while True:
        found = reader.find(request_id)
        spans = reader.spans(found[0]) if found else []
        if is_settled(spans, time.time_ns()) or time.monotonic() >= deadline:
            return spans
        time.sleep(_POLL_SECONDS)


def is_settled(spans: list[StoredSpan], now_ns: int) -> bool:
    """Whether no more spans are to be expected: the last one ended longer ago than the services' export interval."""
    return bool(spans) and now_ns - max(span.end_ns for span in spans) > _SETTLE_NS


def to_json(spans: list[StoredSpan]) -> dict[str, object]:
    """The trace as one object: spans in tree order, and the gaps between them; times in microseconds from the trace's start."""
    start_ns, end_ns = whole_ns(spans)
    rows = build_tree(spans)
    return {
        "trace_id": spans[0].trace_id,
        "request_ids": sorted({name for span in spans for name in span.request_ids()}),
        "start_unix_ns": start_ns,
        "duration_us": (end_ns - start_ns) / 1000,
        "spans": [_span_json(row, start_ns) for row in rows if isinstance(row, SpanNode)],
        "gaps": [_gap_json(row, start_ns) for row in rows if isinstance(row, Gap)],
    }


def _span_json(node: SpanNode, start_ns: int) -> dict[str, object]:
    span = node.span
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id or None,
        "depth": node.depth,
        "name": span.name,
        "kind": span.kind,
        "service": span.service,
        "instance": span.instance,
        "offset_us": (span.start_ns - start_ns) / 1000,
        "duration_us": (span.end_ns - span.start_ns) / 1000,
        "error": span.error,
        "attributes": dict(span.attributes),
        "events": [_event_json(event, start_ns) for event in span.events],
    }


def _gap_json(gap: Gap, start_ns: int) -> dict[str, object]:
    return {
        "parent_id": gap.parent_id,
        "offset_us": (gap.start_ns - start_ns) / 1000,
        "duration_us": (gap.end_ns - gap.start_ns) / 1000,
    }


def _event_json(event: StoredEvent, start_ns: int) -> dict[str, object]:
    return {"name": event.name, "offset_us": (event.unix_ns - start_ns) / 1000, "attributes": dict(event.attributes)}


def _complain(message: str, code: int = 1) -> int:
    print(f"tokenloom trace: {message}", file=sys.stderr)
    return code
