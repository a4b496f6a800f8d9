"""A collector for tests: a real OTLP/gRPC receiver that keeps spans in memory, and can hang or be away as real ones can."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from libs.telemetry.trace_store import StoredSpan
from libs.telemetry.trace_store_otlp import convert

ARRIVAL_SECONDS = 30.0


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """`with OtlpReceiver.running() as receiver`. Spans are as the built-in store would keep them; `resources` by service name."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[StoredSpan] = []
        self._answering = threading.Event()
        self._answering.set()
        self._server: grpc.Server | None = None
        self._port = 0
        self.resources: dict[str, dict[str, Any]] = {}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[OtlpReceiver]:
        """One that listens on a free port of the loopback interface, until the block ends."""
        receiver = cls()
        receiver.come_back()
        try:
            yield receiver
        finally:
            receiver.answer()
            receiver.go_away()

    @property
    def endpoint(self) -> str:
        """Its URL, the same however often it goes and comes back."""
        return f"http://127.0.0.1:{self._port}"

    def go_away(self) -> None:
        """Stops listening: connections are refused."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def come_back(self) -> None:
        """Listens, at the port it had before."""
        # More threads than exports can hang here at once: a service has one on its way.
        server = grpc.server(ThreadPoolExecutor(16, thread_name_prefix="otlp"), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        server.start()
        self._server = server

    def hang(self) -> None:
        """From now on takes exports and never answers, until `answer`."""
        self._answering.clear()

    def answer(self) -> None:
        """Answers again; what hung is answered too."""
        self._answering.set()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        """See OTLP."""
        while not self._answering.wait(0.05):
            if not context.is_active():
                return trace_service_pb2.ExportTraceServiceResponse()
        spans = list(convert(request.resource_spans))
        with self._arrived:
            self._spans += spans
            for group in request.resource_spans:
                resource = {attribute.key: attribute.value.string_value for attribute in group.resource.attributes}
                self.resources[resource["service.name"]] = resource
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[StoredSpan]:
        """What has arrived of a trace."""
        with self._arrived:
            return [span for span in self._spans if span.trace_id == trace_id]

    def await_tree(self, trace_id: str, expected: str, seconds: float = ARRIVAL_SECONDS) -> list[StoredSpan]:
        """The spans of a trace once its tree is `expected` (see `tree`). Fails with both trees when it does not get so."""
        wanted, deadline = _normal(expected), time.monotonic() + seconds
        with self._arrived:
            while True:
                spans = [span for span in self._spans if span.trace_id == trace_id]
                if tree(spans) == wanted or not self._arrived.wait(deadline - time.monotonic()):
                    break
        assert tree(spans) == wanted
        return spans


def tree(spans: Sequence[StoredSpan]) -> str:
    """A trace in words: a line per span, "name (service kind)", below its parent, siblings by name and not by their clocks."""
    present = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_id not in present]
    return "\n".join(line for root in sorted(roots, key=_line) for line in _lines(root, spans, 0))


def _lines(span: StoredSpan, spans: Sequence[StoredSpan], depth: int) -> Iterator[str]:
    yield "  " * depth + _line(span)
    below = sorted((other for other in spans if other.parent_id == span.span_id), key=lambda other: _normal_order(other, spans))
    for child in below:
        yield from _lines(child, spans, depth + 1)


def _normal_order(span: StoredSpan, spans: Sequence[StoredSpan]) -> tuple[str, ...]:
    return _line(span), *sorted(_line(other) for other in spans if other.parent_id == span.span_id)


def _line(span: StoredSpan) -> str:
    return f"{span.name} ({span.service.removeprefix('tokenloom-')} {span.kind})"


def _normal(text: str) -> str:
    """An expected tree without the indentation of the test that it stands in."""
    lines = [line for line in text.splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[indent:].rstrip() for line in lines)


def one(spans: Iterable[StoredSpan], name: str) -> StoredSpan:
    """The only span of that name."""
    (found,) = [span for span in spans if span.name == name]
    return found
