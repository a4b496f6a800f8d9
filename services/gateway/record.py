"""What is remembered of one request while it runs, and its trace, metrics and log line when it is over.

The stages of a request with one choice touch each other and add up to its root span:

    tokenize | transport | queue | prefill | decode | transport | stream
    (parse, admit, encode: gateway) (gateway) (---- scheduler's ----) (gateway) (until the last byte)

Below `tokenize` lies a client span for each attempt at a tokenizer (tokenizer_client.py), below that the tokenizer's own.

Where a scheduler was lost on the way, `lost` lies before the first transport: all that came to nothing, and the wait until the request
could be submitted again.
queue, prefill and decode are emitted by the scheduler. The two transports lie between the two processes' clocks: where the
scheduler's wall-clock instants do not fall into the gateway's, what its durations leave is split into halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from libs.clock import Clock
from libs.constraints import Constraint, ConstraintKind
from libs.errors import TokenloomError
from libs.sampling import SamplingParams
from libs.telemetry.logs import get_logger
from libs.telemetry.metrics import trace_exemplar
from libs.telemetry.tracing import SpanEvent, SpanRecord, TraceParent, Tracer, new_span_id
from services.gateway.endings import finish_reason, label_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.streamer import Choice, count_tokens
from services.gateway.tickets import FinishReason, Ticket
from services.gateway.wanted import Wanted
from tokenloom.scheduler.v1 import scheduler_pb2

_log = get_logger("gateway.request")


@dataclass(frozen=True, slots=True)
class Hop:
    """A choice's way through the scheduler on the gateway's wall clock, in Unix nanoseconds.

    `submitted_ns` is when its last attempt began: after the losses of schedulers, if there were any.
    """

    submitted_ns: int
    received_ns: int
    ended_ns: int
    returned_ns: int


def hop_of(timings: scheduler_pb2.Timings, submitted_ns: int, returned_ns: int) -> Hop:
    """Where the scheduler's part lies between submit and return. Without timings, all of it is transport."""
    received, ended = timings.received_unix_ns, timings.ended_unix_ns
    if submitted_ns <= received <= ended <= returned_ns:
        return Hop(submitted_ns, received, ended, returned_ns)
    inside = 1000 * (timings.queue_us + timings.prefill_us + timings.decode_us)
    half = max(returned_ns - submitted_ns - inside, 0) // 2
    return Hop(submitted_ns, submitted_ns + half, max(returned_ns - half, submitted_ns + half), returned_ns)


def sampling_attributes(sampling: SamplingParams, constraint: Constraint | None) -> dict[str, AttributeValue]:
    """How tokens are chosen, as OpenTelemetry's conventions name it; what is off is left out, as is what they have no name for."""
    found: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }
    if sampling.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        found["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if constraint is not None:
        found["tokenloom.constraint"] = constraint.kind.value
        if constraint.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT):
            found["gen_ai.output.type"] = "json"
    return found


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request that generates. `*_ns` are Unix nanoseconds, `*_mono` monotonic ones; 0: has not happened."""

    operation: str
    route: str
    request_id: str
    response_id: str
    context: TraceParent
    parent_id: int
    started_ns: int
    started_mono: int
    http: Mapping[str, AttributeValue] = field(default_factory=dict)
    wanted: Wanted | None = None
    status: int = 0
    error: TokenloomError | None = None
    tokenize_span: int = field(default_factory=new_span_id)
    tokenized_ns: int = 0
    parsed_ns: int = 0
    first_token_mono: int = 0
    choices: list[Choice] = field(default_factory=list)
    sampling: dict[str, AttributeValue] = field(default_factory=dict)
    internal_ids: list[str] = field(default_factory=list)

    @property
    def endings(self) -> list[scheduler_pb2.Ending]:
        """The endings that have arrived, in the order of the choices."""
        return [choice.ticket.ending for choice in self.choices if choice.ticket.ending is not None]

    def finish(self, clock: Clock, metrics: GatewayMetrics, tracer: Tracer) -> None:
        """Accounts for the request: called once, when nothing more of it can happen."""
        ended_ns = clock.unix_ns()
        offset = ended_ns - clock.monotonic_ns()
        hops = [
            hop_of(choice.ticket.ending.timings, self._submitted_ns(choice.ticket, offset), choice.ticket.ended_ns + offset)
            for choice in self.choices
            if choice.ticket.ending is not None
        ]
        self._count(metrics, hops, ended_ns, self.exemplar(tracer))
        self._write_log(ended_ns)
        if tracer.enabled and self.context.sampled:
            self._trace(tracer, hops, ended_ns, offset)

    def _submitted_ns(self, ticket: Ticket, offset: int) -> int:
        if not ticket.lost_ns:
            return self.tokenized_ns
        again = ticket.sent_ns if ticket.sent_ns >= ticket.lost_ns[-1] else ticket.ended_ns  # the latter: no scheduler came in time
        return max(self.tokenized_ns, again + offset)

    def exemplar(self, tracer: Tracer) -> dict[str, str] | None:
        """What leads from this request's observations to its trace; None where that is not recorded."""
        return trace_exemplar(self.context.trace_id, recorded=tracer.enabled and self.context.sampled)

    def _count(self, metrics: GatewayMetrics, hops: list[Hop], ended_ns: int, exemplar: dict[str, str] | None) -> None:
        if self.error is not None:
            metrics.labelled(metrics.rejected, reason=self.error.code.spec.label).inc()
        for choice in self.choices:
            if choice.ticket.ending is not None:
                _count_choice(metrics, choice, choice.ticket.ending, exemplar)
        if self.error is None and self.choices:
            metrics.e2e_latency.observe((ended_ns - self.started_ns) / 1e9, exemplar)
            if len(hops) == 1:
                self._count_stages(metrics, hops[0], ended_ns)

    def _count_stages(self, metrics: GatewayMetrics, hop: Hop, ended_ns: int) -> None:
        timings = self.endings[0].timings
        metrics.observe_stage("tokenize", (self.tokenized_ns - self.started_ns) / 1e9)
        if hop.submitted_ns > self.tokenized_ns:
            metrics.observe_stage("lost", (hop.submitted_ns - self.tokenized_ns) / 1e9)
        metrics.observe_stage("transport", (hop.received_ns - hop.submitted_ns + hop.returned_ns - hop.ended_ns) / 1e9)
        metrics.observe_stage("queue", timings.queue_us / 1e6)
        metrics.observe_stage("prefill", timings.prefill_us / 1e6)
        metrics.observe_stage("decode", timings.decode_us / 1e6)
        metrics.observe_stage("stream", (ended_ns - hop.returned_ns) / 1e9)

    def _write_log(self, ended_ns: int) -> None:
        endings, tokens = self.endings, count_tokens(self.choices)
        _log.info(
            "request finished",
            route=self.route,
            status=self.status,
            stream=self.wanted.stream if self.wanted is not None else None,
            finish=[label_of(ending) for ending in endings],
            error=self.error.code.spec.label if self.error is not None else None,
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            cached_tokens=tokens.cached or 0,
            ttft_ms=round((self.first_token_mono - self.started_mono) / 1e6, 1) if self.first_token_mono else None,
            total_ms=round((ended_ns - self.started_ns) / 1e6, 1),
            attempts=max((choice.ticket.attempt + 1 for choice in self.choices), default=0),
        )

    def _trace(self, tracer: Tracer, hops: list[Hop], ended_ns: int, offset: int) -> None:
        self._trace_tokenize(tracer, ended_ns)
        ended = [choice for choice in self.choices if choice.ticket.ending is not None]
        for hop, choice in zip(hops, ended, strict=True):
            where: dict[str, AttributeValue] = {"tokenloom.choice": choice.index}
            if choice.ticket.lost_ns:
                events = [SpanEvent("scheduler_lost", lost + offset) for lost in choice.ticket.lost_ns]
                self._stage(tracer, "lost", self.tokenized_ns, hop.submitted_ns, where, events)
            self._stage(tracer, "transport", hop.submitted_ns, hop.received_ns, {**where, "tokenloom.direction": "to_scheduler"})
            self._stage(tracer, "transport", hop.ended_ns, hop.returned_ns, {**where, "tokenloom.direction": "from_scheduler"})
        if hops:
            self._stage(tracer, "stream", max(hop.returned_ns for hop in hops), ended_ns, {})
        tracer.emit(
            SpanRecord(
                name=f"POST {self.route}",
                context=self.context,
                parent_id=self.parent_id,
                start_ns=self.started_ns,
                end_ns=ended_ns,
                attributes=self._attributes(),
                events=[SpanEvent("first_token", self.first_token_mono + offset)] if self.first_token_mono else (),
                kind=SpanKind.SERVER,
                error=self._failure,
                remote_parent=self.parent_id != 0,
            )
        )

    def _trace_tokenize(self, tracer: Tracer, ended_ns: int) -> None:
        # A request that failed before its prompt was encoded spent all its time in this stage.
        tokenized = self.tokenized_ns or ended_ns
        parsed = (self.parsed_ns or tokenized) - self.started_ns
        tracer.emit(
            SpanRecord(
                name="tokenize",
                context=self.context.child(self.tokenize_span),
                parent_id=self.context.span_id,
                start_ns=self.started_ns,
                end_ns=tokenized,
                attributes={"tokenloom.parse_us": parsed // 1000},
                error=None if self.tokenized_ns else self._failure,
            )
        )

    @property
    def _failure(self) -> str | None:
        """What failed, where it was this server's fault: a client's mistake or departure makes no failed trace."""
        failed = self.error is not None and self.error.code.spec.http_status >= 500
        return self.error.message if self.error is not None and failed else None

    def _stage(
        self, tracer: Tracer, name: str, start: int, end: int, attributes: Mapping[str, AttributeValue], events: Sequence[SpanEvent] = ()
    ) -> None:
        context = self.context.child(new_span_id())
        tracer.emit(SpanRecord(name, context, self.context.span_id, start, end, attributes, events))

    def _attributes(self) -> dict[str, AttributeValue]:
        endings = self.endings
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.response.id": self.response_id,
            "gen_ai.provider.name": "tokenloom",
            "tokenloom.x_request_id": self.request_id,
            **self.http,
            "http.route": self.route,
            "http.response.status_code": self.status,
            **self.sampling,
        }
        if self.wanted is not None:
            attributes |= _asked(self.wanted)
        if self.internal_ids:
            attributes["tokenloom.request_id"] = self.internal_ids[0] if len(self.internal_ids) == 1 else self.internal_ids
        if endings:
            tokens = count_tokens(self.choices)
            attributes |= {
                "gen_ai.response.finish_reasons": [label_of(ending) for ending in endings],
                "gen_ai.usage.input_tokens": tokens.prompt,
                "gen_ai.usage.output_tokens": tokens.completion,
                "gen_ai.usage.cache_read.input_tokens": tokens.cached or 0,
                "tokenloom.attempts": max(choice.ticket.attempt + 1 for choice in self.choices),
            }
            if self.wanted is not None:
                attributes["gen_ai.response.model"] = self.wanted.model
        if self.first_token_mono:
            attributes["gen_ai.response.time_to_first_chunk"] = (self.first_token_mono - self.started_mono) / 1e9
        if self.error is not None:
            attributes["error.type"] = self.error.code.spec.label
        return attributes


def _asked(wanted: Wanted) -> dict[str, AttributeValue]:
    """What the client asked for that needs no model to be known. Of stop strings and prompts nothing: they are the client's text."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": wanted.model,
        "gen_ai.request.stream": wanted.stream,
        "gen_ai.output.type": "text",
    }
    if wanted.n != 1:
        attributes["gen_ai.request.choice.count"] = wanted.n
    if wanted.sampling.seed is not None:
        attributes["gen_ai.request.seed"] = wanted.sampling.seed
    return attributes


def _count_choice(metrics: GatewayMetrics, choice: Choice, ending: scheduler_pb2.Ending, exemplar: dict[str, str] | None) -> None:
    ticket = choice.ticket
    if finish_reason(ending):
        metrics.labelled(metrics.success, finished_reason=label_of(ending)).inc()
    elif ending.reason != FinishReason.FINISH_REASON_FAILED:
        metrics.labelled(metrics.cancelled, reason=label_of(ending)).inc()
    if choice.is_first:
        metrics.prompt_tokens.inc(ending.prompt_tokens)
        metrics.request_prompt_tokens.observe(ending.prompt_tokens)
    metrics.request_generation_tokens.observe(ending.completion_tokens)
    if len(ticket.output) > 1:
        mean_ns = (ticket.last_token_ns - ticket.first_token_ns) / (len(ticket.output) - 1)
        metrics.time_per_output_token.observe(mean_ns / 1e9, exemplar)
