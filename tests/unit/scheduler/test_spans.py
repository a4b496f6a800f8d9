"""Spans of one request: queue, prefill, decode; one after the other, with each event where it happened."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from libs.clock import ManualClock
from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.tracing import TraceParent, Tracer
from services.scheduler import spans
from services.scheduler.core.group import Group
from services.scheduler.core.plan import Effects
from services.scheduler.core.request import CancelReason, Ending, Request, RequestEvent
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from services.scheduler.spans import RequestTrace
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import step, submit

PARENT = TraceParent(trace_id=0xABC, span_id=0xDEF, state="vendor=1")


@pytest.fixture
def state() -> SchedulerState:
    return make_state()


@pytest.fixture
def group(state: SchedulerState) -> Group:
    return add_group(state)


def emitted(request: Request, trace: RequestTrace | None = None) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = Tracer("scheduler", "s0", exporters=[exporter])
    spans.emit(tracer, trace or RequestTrace(PARENT, "label"), request, ManualClock())
    tracer.shutdown()
    return exporter.get_finished_spans()


def served(state: SchedulerState, group: Group) -> Request:
    """Received at 100, dispatched at 1000 (32 of 40 tokens) and 2000, decoded at 3000 and 4000."""
    request = submit(state, [1] * 40, max_tokens=3)
    request.timeline.received_ns = 100
    for now in (1000, 2000, 3000, 4000):
        step(state, group, now)
    return request


def test_a_finished_request_has_three_consecutive_stages(state: SchedulerState, group: Group):
    stages = emitted(served(state, group))
    assert [span.name for span in stages] == ["queue", "prefill", "decode"]
    assert [(span.start_time, span.end_time) for span in stages] == [(100, 1000), (1000, 2000), (2000, 4000)]
    assert all(before.end_time == after.start_time for before, after in itertools.pairwise(stages))


def test_the_stages_are_children_of_the_submits_context(state: SchedulerState, group: Group):
    for span in emitted(served(state, group)):
        assert span.parent is not None
        assert (span.parent.span_id, span.parent.trace_id, span.parent.is_remote) == (0xDEF, 0xABC, True)
        assert span.context is not None
        assert span.context.trace_id == 0xABC


def test_prefill_and_decode_have_the_ids_that_the_worker_was_told(state: SchedulerState, group: Group):
    trace = RequestTrace(PARENT, "")
    by_name = {span.name: span for span in emitted(served(state, group), trace)}
    wire = trace.wire(started=False)
    assert wire.prefill.span_id == by_name["prefill"].context.span_id  # type: ignore[union-attr]
    assert wire.decode_span_id == by_name["decode"].context.span_id  # type: ignore[union-attr]
    assert (wire.prefill.trace_id, wire.prefill.state) == (0xABC, "vendor=1")


def test_what_a_resumed_request_computes_again_lies_within_its_decode_stage():
    trace = RequestTrace(PARENT, "")
    wire = trace.wire(started=True)
    assert (wire.prefill.span_id, wire.decode_span_id) == (trace.decode_id, trace.decode_id)


def test_each_chunk_is_an_event_of_the_prefill(state: SchedulerState, group: Group):
    _, prefill, decode = emitted(served(state, group))
    assert [(event.name, event.timestamp, dict(event.attributes or {})) for event in prefill.events] == [
        ("chunk", 1000, {"tokenloom.tokens": 32})
    ]
    assert dict(prefill.attributes or {})["tokenloom.chunks"] == 2
    # The second chunk was planned at the instant of the first token: the boundary belongs to what follows.
    assert [event.timestamp for event in decode.events] == [2000]


def test_every_event_is_in_exactly_one_stage(state: SchedulerState, group: Group):
    request = served(state, group)
    request.timeline.events[:] = [RequestEvent("waiting", at, "no_slot") for at in (100, 999, 1000, 1999, 2000, 3999, 4000, 5000)]
    stages = emitted(request)
    assert [[event.timestamp for event in span.events] for span in stages] == [[100, 999], [1000, 1999], [2000, 3999, 4000, 5000]]


def test_why_it_waited_is_said_at_the_queue(state: SchedulerState, group: Group):
    request = served(state, group)
    request.timeline.events.insert(0, RequestEvent("waiting", 200, "no_slot"))
    queue = emitted(request)[0]
    assert dict(queue.attributes or {})["tokenloom.wait_reason"] == "no_slot"
    assert [dict(event.attributes or {}) for event in queue.events] == [{"tokenloom.reason": "no_slot", "tokenloom.wait_us": 0}]


def test_each_reason_says_how_long_and_the_longest_is_named(state: SchedulerState, group: Group):
    request = served(state, group)
    line = request.timeline
    line.received_ns, line.dispatched_ns, line.first_token_ns, line.ended_ns = 0, 1_000_000, 2_000_000, 3_000_000
    waits = ((50_000, "no_blocks"), (100_000, "behind_another"), (600_000, "no_blocks"), (700_000, "no_slot"))
    line.events[:] = [RequestEvent("waiting", at, reason) for at, reason in waits]
    queue = emitted(request)[0]
    attributes = {name: value for name, value in (queue.attributes or {}).items() if "wait" in name}
    assert attributes == {
        "tokenloom.wait_reason": "behind_another",
        "tokenloom.wait_us.no_blocks": 150,
        "tokenloom.wait_us.behind_another": 500,
        "tokenloom.wait_us.no_slot": 300,
    }
    assert [(event.attributes or {})["tokenloom.wait_us"] for event in queue.events] == [50, 500, 100, 300]


def test_a_request_that_waited_for_nothing_says_so(state: SchedulerState, group: Group):
    attributes = dict(emitted(served(state, group))[0].attributes or {})
    assert [(name, value) for name, value in attributes.items() if "wait" in name] == [("tokenloom.wait_reason", "none")]


def test_the_time_until_the_planner_first_looked_at_it_is_a_reason_of_its_own(state: SchedulerState, group: Group):
    request = served(state, group)
    line = request.timeline
    line.received_ns, line.dispatched_ns, line.first_token_ns, line.ended_ns = 0, 9_000_000, 10_000_000, 11_000_000
    line.events[:] = []
    assert _waited(request) == {"tokenloom.wait_reason": "new", "tokenloom.wait_us.new": 9000}
    line.events[:] = [RequestEvent("waiting", 2_000_000, "no_slot")]
    assert _waited(request) == {"tokenloom.wait_reason": "no_slot", "tokenloom.wait_us.new": 2000, "tokenloom.wait_us.no_slot": 7000}


def _waited(request: Request) -> dict[str, object]:
    return {name: value for name, value in (emitted(request)[0].attributes or {}).items() if "wait" in name}


def test_a_preemption_is_an_event_of_the_decode(state: SchedulerState, group: Group):
    request = submit(state, [1] * 4, max_tokens=3)
    request.timeline.received_ns = 100
    step(state, group, 1000)
    state.requeue(request, "preempted", 1500)
    step(state, group, 2000)
    step(state, group, 3000)
    decode = emitted(request)[-1]
    assert [event.name for event in decode.events if event.name != "chunk"] == ["preempted", "resumed"]
    attributes = dict(decode.attributes or {})
    assert (attributes["tokenloom.preemptions"], attributes["tokenloom.output_tokens"]) == (1, 3)
    assert attributes["tokenloom.finish_reason"] == "length"


def test_one_cancelled_while_waiting_has_a_queue_stage_only(state: SchedulerState):
    request = submit(state, [1])
    request.timeline.received_ns = 100
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 700)
    stages = emitted(request)
    assert [(span.name, span.start_time, span.end_time) for span in stages] == [("queue", 100, 700)]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Ending(FinishReason.CANCELLED, cancel=CancelReason.SLOW_READER), "slow_reader"),
        (Ending(FinishReason.DEADLINE), "timeout"),
    ],
)
def test_one_ended_from_outside_says_so_and_why_with_its_last_event(state: SchedulerState, ending: Ending, reason: str):
    request = submit(state, [1] * 40)
    state.finish(request, ending, 700, Effects())
    (event,) = emitted(request)[-1].events
    assert (event.name, event.timestamp, dict(event.attributes or {})) == ("cancelled", 700, {"tokenloom.reason": reason})


def test_one_cancelled_during_prefill_has_no_decode(state: SchedulerState, group: Group):
    request = submit(state, [1] * 60)
    request.timeline.received_ns = 100
    step(state, group, 1000)
    state.cancel(request.key, CancelReason.CLIENT_DISCONNECTED, 1700)
    assert [(span.name, span.end_time) for span in emitted(request)] == [("queue", 1000), ("prefill", 1700)]


def test_a_failure_marks_the_last_stage_only(state: SchedulerState, group: Group):
    request = submit(state, [1] * 60)
    step(state, group, 1000)
    error = TokenloomError(ErrorCode.STEP_FAILED, "the worker failed")
    state.finish(request, Ending(FinishReason.FAILED, error=error), 2000, Effects())
    stages = emitted(request)
    assert [span.status.status_code for span in stages] == [StatusCode.UNSET, StatusCode.ERROR]
    assert stages[-1].status.description == "the worker failed"


def test_an_unsampled_trace_gives_no_spans(state: SchedulerState, group: Group):
    unsampled = RequestTrace(TraceParent(1, 2, sampled=False), "")
    assert emitted(served(state, group), unsampled) == ()
