import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceState

from libs.telemetry.tracing import SpanEvent, SpanRecord, TraceParent, Tracer, new_span_id

CONTEXTS = st.builds(
    TraceParent,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    sampled=st.booleans(),
)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class LogCapture(logging.Handler):
    """What the SDK logs while it is entered."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("opentelemetry").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("opentelemetry").removeHandler(self)


@pytest.fixture
def exported():
    """A tracer, and what it has exported once it is shut down."""
    exporter = InMemorySpanExporter()
    tracer = Tracer("scheduler", "scheduler-0", exporters=[exporter])

    def finish():
        tracer.shutdown()
        return exporter.get_finished_spans()

    yield tracer, finish
    tracer.shutdown()


@given(CONTEXTS)
def test_a_context_survives_the_header(context):
    assert TraceParent.parse(str(context)) == context


@given(CONTEXTS, st.text("\t ", max_size=3))
def test_blanks_around_the_header_do_not_matter(context, blanks):
    assert TraceParent.parse(f"{blanks}{context}{blanks}") == context


@given(st.text(max_size=80))
def test_no_header_is_so_odd_that_parsing_it_fails(header):
    context = TraceParent.parse(header)
    assert context is None or (context.trace_id and context.span_id)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"0-{TRACE}-{SPAN}-01",
    ],
)
def test_headers_that_the_recommendation_calls_invalid_are_no_context(header):
    assert TraceParent.parse(header) is None


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known():
    context = TraceParent.parse(f"01-{TRACE}-{SPAN}-03-more")
    assert context == TraceParent(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize("state", ["vendor=1", "a=b, c@d=e f,,", '9x@t="q"', ",".join(f"k{index}=v" for index in range(32))])
def test_a_valid_tracestate_is_kept_as_it_is(state):
    context = TraceParent.parse(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == state
    assert len(TraceState.from_header([state])) == len([member for member in state.split(",") if member])


@given(st.text("aA9@=, \té\n_", max_size=12) | st.from_regex(r"([a-z]=[a-z!],?){0,40}", fullmatch=True))
def test_the_sdk_never_warns_of_a_tracestate_that_was_kept(state):
    context = TraceParent.parse(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    with LogCapture() as caught:
        parsed = TraceState.from_header([context.state])
    assert not caught.messages
    assert bool(parsed) == bool(context.state.strip(", \t"))


@pytest.mark.parametrize("state", ["=,=;", "a", "A=b", "a=b,a=c", "é=1", "a=b=c", ",".join(f"k{index}=v" for index in range(33))])
def test_an_invalid_tracestate_is_dropped_whole(state):
    context = TraceParent.parse(f"00-{TRACE}-{SPAN}-01", f"vendor=1,{state}")
    assert context is not None
    assert context.state == ""


def test_a_child_stays_in_its_trace_and_keeps_flag_and_state():
    parent = TraceParent(5, 6, False, "vendor=1")
    assert parent.child(7) == TraceParent(5, 7, False, "vendor=1")


def test_new_ids_are_never_zero_and_differ():
    ids = {new_span_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert 0 not in ids
    assert TraceParent.new() != TraceParent.new()


def test_a_span_is_exported_as_it_was_recorded(exported):
    tracer, finish = exported
    context = TraceParent(1, 2, True, "vendor=1")
    record = SpanRecord(
        "prefill", context, 9, 1_000, 3_000, {"tokens": 5}, [SpanEvent("chunk", 2_000, {"size": 3})], SpanKind.SERVER, remote_parent=True
    )
    tracer.emit(record)
    (span,) = finish()
    assert (span.name, span.start_time, span.end_time, span.kind) == ("prefill", 1_000, 3_000, SpanKind.SERVER)
    assert (span.context.trace_id, span.context.span_id, span.parent.span_id, span.parent.is_remote) == (1, 2, 9, True)
    assert dict(span.attributes) == {"tokens": 5}
    assert [(event.name, event.timestamp, dict(event.attributes)) for event in span.events] == [("chunk", 2_000, {"size": 3})]
    assert span.resource.attributes["service.name"] == "tokenloom-scheduler"
    assert span.resource.attributes["service.instance.id"] == "scheduler-0"
    assert span.context.trace_state.to_header() == "vendor=1"
    assert span.status.status_code is StatusCode.UNSET


def test_a_span_without_a_parent_is_a_root(exported):
    tracer, finish = exported
    tracer.emit(SpanRecord("root", TraceParent(1, 2), 0, 1, 2))
    assert finish()[0].parent is None


def test_an_error_is_the_spans_status_even_when_it_has_no_words(exported):
    tracer, finish = exported
    tracer.emit(SpanRecord("decode", TraceParent(1, 2), 0, 1, 2, error="no worker"))
    tracer.emit(SpanRecord("decode", TraceParent(1, 3), 0, 1, 2, error=""))
    assert [span.status.status_code for span in finish()] == [StatusCode.ERROR, StatusCode.ERROR]


def test_a_span_never_ends_before_it_starts(exported):
    tracer, finish = exported
    tracer.emit(SpanRecord("short", TraceParent(1, 2), 0, 10, 9))
    assert finish()[0].end_time == 10


def test_spans_of_an_unsampled_trace_are_not_exported(exported):
    tracer, finish = exported
    tracer.emit(SpanRecord("dropped", TraceParent(1, 2, sampled=False), 0, 1, 2))
    assert finish() == ()


def test_without_exporters_nothing_is_kept():
    tracer = Tracer("gateway", "gateway-0")
    assert not tracer.enabled
    tracer.emit(SpanRecord("dropped", TraceParent(1, 2), 0, 1, 2))
    tracer.shutdown()
