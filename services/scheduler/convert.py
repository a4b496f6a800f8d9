"""Between the wire and the core: messages become the core's plain data and back. No policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.blocks import HASH_BYTES
from libs.clock import Clock
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from libs.packing import count_ids, pack_ids, unpack_ids
from libs.sampling import SamplingParams
from libs.telemetry.tracing import TraceParent
from services.scheduler.core.naming import extend_names
from services.scheduler.core.plan import BatchOutcome, Cut, PlannedOpen, RowOutcome, RowPositions, StepOutcome, StepPlan, StepTimings
from services.scheduler.core.request import CancelReason, Request, RequestKey, Timeline
from services.scheduler.core.stopping import FinishReason, Stop, StopRules, StopTracker
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

_BATCH_OUTCOMES = {
    worker_pb2.BATCH_OUTCOME_OK: BatchOutcome.OK,
    worker_pb2.BATCH_OUTCOME_NOT_RUN: BatchOutcome.NOT_RUN,
    worker_pb2.BATCH_OUTCOME_FAILED: BatchOutcome.FAILED,
}
_ROW_OUTCOMES = {
    worker_pb2.ROW_OUTCOME_OK: RowOutcome.OK,
    worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE: RowOutcome.CONSTRAINT_COMPLETE,
    worker_pb2.ROW_OUTCOME_DEAD_END: RowOutcome.DEAD_END,
    worker_pb2.ROW_OUTCOME_NON_FINITE: RowOutcome.NON_FINITE,
    worker_pb2.ROW_OUTCOME_NOT_RUN: RowOutcome.NOT_RUN,
    worker_pb2.ROW_OUTCOME_REFUSED_ARGS: RowOutcome.REFUSED_ARGS,
}
_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.FAILED: common_pb2.FINISH_REASON_FAILED,
    FinishReason.CONSTRAINT_COMPLETE: common_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
}
_CANCEL = {
    CancelReason.CLIENT_DISCONNECTED: common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED,
    CancelReason.SLOW_READER: common_pb2.CANCEL_REASON_SLOW_READER,
    CancelReason.TIMEOUT: common_pb2.CANCEL_REASON_TIMEOUT,
    CancelReason.SESSION_LOST: common_pb2.CANCEL_REASON_SESSION_LOST,
    CancelReason.SHUTDOWN: common_pb2.CANCEL_REASON_SHUTDOWN,
    CancelReason.SIBLING_FAILED: common_pb2.CANCEL_REASON_SIBLING_FAILED,
}
_CANCEL_BACK: dict[int, CancelReason] = {int(wire): reason for reason, wire in _CANCEL.items()}


# Log-probabilities of one prompt, alternatives included: 32 MiB, which its gateway holds until they are all there.
MOST_PROMPT_ENTRIES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SubmitRules:
    """What a submit must keep to: the served model's stopping, the number of its ids, whether priorities are served, how many
    alternatives log-probabilities of output and prompt may list, and whether workers take constraints."""

    stopping: StopRules
    vocab_size: int
    priorities: bool = False
    max_logprobs: int = 0
    max_prompt_logprobs: int = 0
    constraints: bool = False


@dataclass(frozen=True, slots=True)
class WireTrace:
    """Trace of a request as the worker needs it: the prefill span's context, the decode span's id, and that of both spans' parent."""

    prefill: TraceParent
    decode_span_id: int
    request_span_id: int


def cancel_reason(wire: int) -> CancelReason:
    """The core's reason; one that this version does not know counts as a disconnect."""
    return _CANCEL_BACK.get(wire, CancelReason.CLIENT_DISCONNECTED)


def to_request(submit: scheduler_pb2.Submit, gateway: int, rules: SubmitRules, arrival: int, now_ns: int) -> tuple[Request, Stop | None]:
    """A request from its submit, its stopping state replayed over tokens that the client has already; and the stop they bring, if they do.

    Raises TokenloomError (INVALID_REQUEST, UNSUPPORTED) naming the parameter.
    """
    _check_submit(submit, rules)
    sampling = SamplingParams.from_proto(submit.sampling)
    prompt, outputs = unpack_ids(submit.prompt_ids), unpack_ids(submit.output_ids)
    highest = max(max(prompt), max(outputs, default=0))
    if highest >= rules.vocab_size:
        message = f"token id {highest} is not in the vocabulary, which has {rules.vocab_size} ids"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="prompt")
    stops = StopTracker(rules.stopping, sampling, len(prompt), resumed=submit.attempt > 0)
    stop, replayed = None, list[int]()
    for token in outputs:
        replayed.append(token)
        stop = stops.push(token, replayed)
    hashes = [submit.block_hashes[at : at + HASH_BYTES] for at in range(0, len(submit.block_hashes), HASH_BYTES)]
    request = Request(
        RequestKey(gateway, submit.id),
        submit.attempt,
        arrival,
        prompt,
        sampling,
        stops,
        Timeline(received_ns=now_ns),
        output_ids=outputs,
        block_names=hashes,
        cacheable=bool(hashes),
        deadline_ns=now_ns + submit.deadline_remaining_us * 1000 if submit.HasField("deadline_remaining_us") else None,
        priority=submit.priority,
        tenant=submit.tenant,
        parent=RequestKey(gateway, submit.parent_id) if submit.parent_id else None,
        constraint=_constraint_of(submit, rules) if submit.HasField("constraint") else None,
    )
    extend_names(request)
    return request, stop


def _constraint_of(submit: scheduler_pb2.Submit, rules: SubmitRules) -> Constraint:
    param = submit.constraint.param
    if not rules.constraints:
        raise TokenloomError(ErrorCode.UNSUPPORTED, "constraints on the output are not served: the workers have no backend", param=param)
    try:
        return Constraint.from_proto(submit.constraint)
    except ValueError as error:  # of a kind that this version does not know, or no UTF-8
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"this constraint cannot be read: {error}", param=param) from error


def _check_submit(submit: scheduler_pb2.Submit, rules: SubmitRules) -> None:
    if not submit.prompt_ids or len(submit.prompt_ids) % 4 or len(submit.output_ids) % 4:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, "prompt_ids must hold at least one little-endian uint32", param="prompt")
    if len(submit.block_hashes) % HASH_BYTES or len(submit.block_hashes) // HASH_BYTES > len(submit.prompt_ids) // 64:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, "block_hashes does not fit the prompt", param="prompt")
    if submit.sampling.max_tokens < 1:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, "max_tokens must be at least 1", param="max_tokens")
    if not all(submit.sampling.stop):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, "a stop string must not be empty", param="stop")
    if submit.sampling.stop and not rules.stopping.table.verified:
        raise TokenloomError(ErrorCode.UNSUPPORTED, "stop strings are not served: this tokenizer's text table is not exact", param="stop")
    if submit.adapter:
        raise TokenloomError(ErrorCode.UNSUPPORTED, "LoRA adapters are not built yet", param="model")
    if submit.priority and not rules.priorities:
        message = "priority is not served: the scheduler must be started with --scheduling-policy priority"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="priority")
    if submit.choices > 1:
        raise TokenloomError(ErrorCode.UNSUPPORTED, "a submit stands for one choice; each further one names its parent", param="n")
    _check_logprobs(submit, rules)


def _check_logprobs(submit: scheduler_pb2.Submit, rules: SubmitRules) -> None:
    sampling = submit.sampling
    for name, most in (("logprobs", rules.max_logprobs), ("prompt_logprobs", rules.max_prompt_logprobs)):
        asked = getattr(sampling, name)
        if asked > most:
            message = f"{name} must be at most {most} here (--max-logprobs, and what a step's answer holds); got {asked}"
            raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param=name)
    entries = (sampling.prompt_logprobs + 1) * count_ids(submit.prompt_ids)
    if sampling.HasField("prompt_logprobs") and entries > MOST_PROMPT_ENTRIES:
        message = f"the prompt's log-probabilities would be {entries}; at most {MOST_PROMPT_ENTRIES} are given"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="prompt_logprobs")


def to_batch(plan: StepPlan, trace_of: Callable[[RequestKey], WireTrace | None]) -> worker_pb2.StepBatch:
    """A plan as it travels; the first one of a lease speaks for all its steps."""
    rows = plan.rows
    return worker_pb2.StepBatch(
        epoch=plan.epoch,
        number=plan.number,
        predecessor=plan.predecessor,
        lease_steps=plan.steps,
        closes=plan.closes,
        opens=[_to_open(entry, trace_of(entry.request.key)) for entry in plan.opens],
        slots=[row.residency.slot for row in rows],
        counts=[row.count for row in rows],
        samples=bytes(row.sample for row in rows),
        new_block_counts=[len(row.new_blocks) for row in rows],
        new_block_ids=pack_ids(block for row in rows for block in row.new_blocks),
    )


def _to_open(entry: PlannedOpen, trace: WireTrace | None) -> worker_pb2.Open:
    request = entry.request
    message = worker_pb2.Open(
        slot=entry.residency.slot,
        request=str(request.key),
        prompt_ids=pack_ids(request.prompt_ids),
        output_ids=pack_ids(request.output_ids),
        computed_tokens=entry.computed,
        block_ids=pack_ids(entry.blocks),
        sampling=request.sampling.to_proto(),
        constraint_id=entry.constraint,
    )
    if not request.needs_positions:  # a worker that goes on need not work out again what has been told
        message.sampling.ClearField("prompt_logprobs")
    if trace is not None:
        message.trace.traceparent, message.trace.tracestate = str(trace.prefill), trace.prefill.state
        message.decode_span_id, message.request_span_id = trace.decode_span_id, trace.request_span_id
    return message


def from_result(result: worker_pb2.StepResult) -> StepOutcome:
    """A worker's answer as the core knows it. Outcomes that this version does not know count as failed.

    Raises ValueError when log-probabilities contradict themselves.
    """
    tokens, drawn, at = list[Sequence[int]](), unpack_ids(result.token_ids), 0
    for count in result.token_counts:
        tokens.append(drawn[at : at + count])
        at += count
    timings = result.timings
    return StepOutcome(
        result.epoch,
        result.number,
        _BATCH_OUTCOMES.get(result.outcome, BatchOutcome.FAILED),
        [_ROW_OUTCOMES.get(worker_pb2.RowOutcome.ValueType(row), RowOutcome.FAILED) for row in result.row_outcomes],
        tokens,
        TokenloomError.from_proto(result.error) if result.HasField("error") else None,
        StepTimings(timings.queued_us, timings.prepare_us, timings.forward_us, timings.sample_us, timings.total_us, timings.idle_us),
        [PackedLogprobs.from_proto(message) for message in result.logprobs],
        {entry.row: RowPositions(entry.first_position, PackedLogprobs.from_proto(entry.logprobs)) for entry in result.prompt_positions},
        dict(result.dead_ends),
    )


def to_cut(cut: Cut) -> worker_pb2.Cut:
    """The wish that a lease ends early, as it travels."""
    return worker_pb2.Cut(epoch=cut.epoch, number=cut.number, last_step=cut.last_step)


def from_closed(closed: worker_pb2.Closed) -> Cut:
    """The answer to it: where the lease really ends."""
    return Cut(closed.epoch, closed.number, closed.last_step)


def to_ending(request: Request, clock: Clock) -> scheduler_pb2.Ending:
    """An ended request as its gateway learns of it. Raises ValueError for a live one."""
    ending = request.ending
    if ending is None:
        raise ValueError(f"request {request.key} is alive")
    message = scheduler_pb2.Ending(
        id=request.key.id,
        attempt=request.attempt,
        reason=_FINISH[ending.reason],
        error=ending.error.to_proto() if ending.error else None,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(request.output_ids),
        cached_tokens=request.cached_tokens,
        timings=_timings(request, clock),
        was_accepted=True,
    )
    if ending.cancel is not None:
        message.cancel_reason = _CANCEL[ending.cancel]
    if ending.stop is not None:
        _set_stop(message, ending.stop)
    return message


def _set_stop(message: scheduler_pb2.Ending, stop: Stop) -> None:
    if stop.stop_string is not None:
        message.stop_string = stop.stop_string
    elif stop.stop_token is not None:
        message.stop_token = stop.stop_token
    if stop.keep_bytes is not None:
        message.keep_bytes = stop.keep_bytes


def _timings(request: Request, clock: Clock) -> scheduler_pb2.Timings:
    line = request.timeline
    offset = clock.unix_ns() - clock.monotonic_ns()
    dispatched = line.dispatched_ns or line.ended_ns
    first = line.first_token_ns or line.ended_ns
    return scheduler_pb2.Timings(
        received_unix_ns=line.received_ns + offset,
        ended_unix_ns=line.ended_ns + offset,
        queue_us=(dispatched - line.received_ns) // 1000,
        prefill_us=(first - dispatched) // 1000,
        decode_us=(line.ended_ns - first) // 1000,
        steps=line.steps,
        preemptions=line.preemptions,
        device_us=line.device_us,
    )


def refusal(submit_id: int, attempt: int, error: TokenloomError) -> scheduler_pb2.Ending:
    """The ending of a submit that was not accepted."""
    return scheduler_pb2.Ending(
        id=submit_id, attempt=attempt, reason=common_pb2.FINISH_REASON_FAILED, error=error.to_proto(), was_accepted=False
    )
