"""The scheduler's spans of one request: queue, prefill, decode; consecutive, built at its ending from its timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libs.clock import Clock
from libs.telemetry.tracing import SpanEvent, SpanRecord, TraceParent, Tracer, new_span_id
from services.scheduler.convert import WireTrace
from services.scheduler.core.request import CancelReason, Ending, Request, RequestEvent, Timeline, WaitReason
from services.scheduler.core.stopping import FinishReason

_QUEUE, _PREFILL, _DECODE = "queue", "prefill", "decode"
# A request that the planner takes up sooner has waited for nothing.
_TAKEN_UP_AT_ONCE_NS = 1_000_000


@dataclass(slots=True)
class RequestTrace:
    """The context a submit came with, and the ids that its spans will have. `label` is the client's x-request-id."""

    parent: TraceParent
    label: str
    prefill_id: int = field(default_factory=new_span_id)
    decode_id: int = field(default_factory=new_span_id)

    def wire(self, *, started: bool) -> WireTrace:
        """What the worker is told. What a request that has `started` to give tokens computes again is part of its decode stage."""
        return WireTrace(self.parent.child(self.decode_id if started else self.prefill_id), self.decode_id, self.parent.span_id)


def emit(tracer: Tracer, trace: RequestTrace, request: Request, clock: Clock) -> None:
    """Emits the stages that an ended request went through. Each event belongs to the stage it happened in.

    One that was ended from outside says so with its last event: `cancelled`, and why.
    """
    line = request.timeline
    offset = clock.unix_ns() - clock.monotonic_ns()
    dispatched, first = line.dispatched_ns or line.ended_ns, line.first_token_ns or line.ended_ns
    stages = [(_QUEUE, new_span_id(), line.received_ns, dispatched)]
    if line.dispatched_ns:
        stages.append((_PREFILL, trace.prefill_id, dispatched, first))
    if line.first_token_ns:
        stages.append((_DECODE, trace.decode_id, first, line.ended_ns))
    waits = _waits(line)
    happened = [(event, waits.get(index)) for index, event in enumerate([*line.events, *_cancelled(request)])]
    error = request.ending.error.message if request.ending and request.ending.error else None
    for index, (name, span_id, start, end) in enumerate(stages):
        last = index == len(stages) - 1
        within = [(event, wait) for event, wait in happened if start <= event.at_ns < end or (last and event.at_ns >= end)]
        tracer.emit(
            SpanRecord(
                name,
                trace.parent.child(span_id),
                trace.parent.span_id,
                start + offset,
                end + offset,
                attributes=_attributes(name, request, waits),
                events=[_event(event, offset, wait) for event, wait in within],
                error=error if last else None,
                remote_parent=True,
            )
        )


def _cancelled(request: Request) -> list[RequestEvent]:
    match request.ending:
        case Ending(reason=FinishReason.CANCELLED, cancel=CancelReason() as why):
            return [RequestEvent("cancelled", request.timeline.ended_ns, why.value)]
        case Ending(reason=FinishReason.DEADLINE):
            return [RequestEvent("cancelled", request.timeline.ended_ns, CancelReason.TIMEOUT.value)]
        case _:
            return []


def _attributes(stage: str, request: Request, waits: Mapping[int, int]) -> dict[str, str | int]:
    line = request.timeline
    common: dict[str, str | int] = {"tokenloom.request_id": str(request.key), "tokenloom.attempt": request.attempt}
    if stage == _QUEUE:
        reasons = _queued(line, waits)
        longest = max(reasons, key=lambda reason: reason[1], default=("none", 0))
        return {
            **common,
            **_summed(reasons),
            "tokenloom.wait_reason": longest[0],
            "tokenloom.prompt_tokens": len(request.prompt_ids),
        }
    if stage == _PREFILL:
        return {**common, "tokenloom.cached_tokens": request.cached_tokens, "tokenloom.chunks": line.chunks}
    ending = request.ending
    return {
        **common,
        "tokenloom.output_tokens": len(request.output_ids),
        "tokenloom.steps": line.steps,
        "tokenloom.preemptions": line.preemptions,
        "tokenloom.device_time_us": line.device_us,
        "tokenloom.finish_reason": ending.reason.value if ending else "",
    }


def _waits(line: Timeline) -> dict[int, int]:
    """How long each wait lasted (ns), by its event's index: until the next reason, the dispatch, the resumption or the end."""
    ends = [event.at_ns if event.name in ("waiting", "resumed") else None for event in line.events]
    found: dict[int, int] = {}
    for index, event in enumerate(line.events):
        if event.name == "waiting":
            later = [line.ended_ns, *(end for end in ends[index + 1 :] if end is not None)]
            if event.at_ns < line.dispatched_ns:
                later.append(line.dispatched_ns)
            found[index] = max(min(later) - event.at_ns, 0)
    return found


def _queued(line: Timeline, waits: Mapping[int, int]) -> list[tuple[str, int]]:
    """Why it waited before its first dispatch, and how long (ns): `new` until the planner, who comes between steps, first looked at it."""
    until = line.dispatched_ns or line.ended_ns
    queued = [index for index in waits if line.events[index].at_ns < until]
    unseen = min((line.events[index].at_ns for index in queued), default=until) - line.received_ns
    first = [(WaitReason.NEW.value, unseen)] if unseen >= _TAKEN_UP_AT_ONCE_NS else []
    return first + [(line.events[index].detail, waits[index]) for index in queued]


def _summed(reasons: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Microseconds of waiting by reason, as attributes."""
    sums: Counter[str] = Counter()
    for reason, lasted in reasons:
        sums[f"tokenloom.wait_us.{reason}"] += lasted // 1000
    return dict(sums)


def _event(event: RequestEvent, offset: int, waited_ns: int | None) -> SpanEvent:
    attributes: dict[str, str | int] = {}
    if event.detail:
        attributes["tokenloom.reason"] = event.detail
    if waited_ns is not None:
        attributes["tokenloom.wait_us"] = waited_ns // 1000
    if event.amount:
        attributes["tokenloom.tokens"] = event.amount
    return SpanEvent(event.name, event.at_ns + offset, attributes)
