"""What a result changes: requests advance, blocks are published, stops are found, failures are answered by a replay.

A result is resolved through the stored plan of its batch number. Late, duplicate and foreign ones are counted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libs.blocks import BLOCK_SIZE
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from services.scheduler.core.group import Group
from services.scheduler.core.leases import open_lease
from services.scheduler.core.naming import extend_names
from services.scheduler.core.plan import (
    BatchOutcome,
    Cut,
    Delta,
    Effects,
    PlannedRow,
    RowOutcome,
    RowPositions,
    StepOutcome,
    StepPlan,
    Told,
)
from services.scheduler.core.request import Ending, Request, RequestState, Residency, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason

# Outcomes of rows whose tokens were computed: their blocks hold what their names say.
_COMPUTED = (RowOutcome.OK, RowOutcome.CONSTRAINT_COMPLETE, RowOutcome.DEAD_END)
# Tokens below which a step's memory is not the budget's fault.
_LEAST_BUDGET = 64
_ROW_ERRORS: Mapping[RowOutcome, tuple[ErrorCode, str, str | None]] = {
    RowOutcome.DEAD_END: (
        ErrorCode.DEAD_END,
        "no token is left to sample: constraint, allowed_token_ids or a logits processor exclude each one",
        None,
    ),
    RowOutcome.NON_FINITE: (ErrorCode.NON_FINITE, "the model's output was not finite", None),
    RowOutcome.FAILED: (ErrorCode.STEP_FAILED, "the worker failed on this request", None),
    RowOutcome.REFUSED_ARGS: (
        ErrorCode.INVALID_REQUEST,
        "vllm_xargs: one of this server's logits processors refuses them; its log says why",
        "vllm_xargs",
    ),
}


def apply(state: SchedulerState, group: Group, outcome: StepOutcome, now_ns: int) -> Effects:
    """Applies one batch's outcome to all requests that stood in it."""
    effects = Effects()
    if outcome.epoch != group.epoch or not group.in_flight or outcome.number != group.in_flight[0].number:
        state.counters.stale_results += 1
        return effects
    plan = group.in_flight.popleft()
    # Behind a batch that failed nothing can have run, whatever its answer says.
    if outcome.outcome is BatchOutcome.OK and not group.broken and _fits(plan, outcome):
        _apply_ok(state, group, plan, outcome, now_ns, effects)
    else:
        _apply_failed(state, group, plan, outcome, now_ns, effects)
    return effects


def _fits(plan: StepPlan, outcome: StepOutcome) -> bool:
    """Whether the answer speaks of as many rows as the batch had."""
    rows = len(plan.rows)
    return len(outcome.rows) == len(outcome.tokens) == rows and len(outcome.logprobs) in (0, rows)


def close(state: SchedulerState, group: Group, closed: Cut, now_ns: int) -> Effects:
    """The worker's answer to a cut: of the lease nothing runs after `last_step`, and the plans behind that are withdrawn.

    A late, duplicate or unknown one is counted and ignored.
    """
    effects, lease = Effects(), open_lease(group)
    if lease is None or not lease.asked or (closed.epoch, closed.number) != (group.epoch, lease.first):
        state.counters.stale_closed += 1
        return effects
    lease.closed = True
    lease.last = min(lease.granted, max(lease.first, closed.last_step))
    if lease.last == lease.granted:
        return effects
    state.counters.cut_leases += 1
    while group.in_flight and group.in_flight[-1].number > lease.last:
        plan = group.in_flight.pop()
        _unresolve(plan)
        for row in plan.rows:
            row.residency.planned, row.residency.last_batch = row.start, lease.last
    # No number is given twice: whatever bears one of a step that never ran is stale.
    group.chain_head = lease.last
    if not group.in_flight:
        group.ledger.resolve(lease.granted)
    _recover_if_drained(state, group, now_ns, effects)
    return effects


def lose_group(state: SchedulerState, group: Group, now_ns: int, *, crashed: bool) -> Effects:
    """The group's stream is gone: its requests return to the queue with what they have. `crashed`: the batch it was running is suspect.

    Behind a batch that failed it was running nothing: that one's requests stay the suspects.
    """
    effects = Effects()
    suspects = _live(group.in_flight[0]) if crashed and group.in_flight else []
    if group.broken:
        suspects = [request for request in group.suspects if request.state is not RequestState.ENDED]
    for plan in group.in_flight:
        _unresolve(plan)
    group.in_flight.clear()
    for request in list(group.running):
        state.requeue(request, "migrated", now_ns)
    del state.groups[group.name]
    state.checking.checks.lose(group.name)
    state.recheck(now_ns, effects)
    suspects = [request for request in suspects if request.state is not RequestState.ENDED]
    _accuse(state, group.name, suspects, now_ns, effects)
    return effects


def _apply_ok(state: SchedulerState, group: Group, plan: StepPlan, outcome: StepOutcome, now_ns: int, effects: Effects) -> None:
    _unresolve(plan)
    device_us, ended = outcome.timings.forward_us + outcome.timings.sample_us, RequestState.ENDED
    if plan.is_later:
        _count_later_step(state, plan)
    for index, (row, row_outcome, tokens) in enumerate(zip(plan.rows, outcome.rows, outcome.tokens, strict=True)):
        if row_outcome not in _COMPUTED:
            row.residency.void = True
        if not row.residency.void:
            for block, name in row.named:
                group.ledger.publish(block, name)
        if row.request.state is ended:
            continue
        row.request.timeline.device_us += device_us
        listed = outcome.logprobs[index] if outcome.logprobs else None
        drawn = _Drawn(tokens, listed, outcome.positions.get(index), outcome.dead_ends.get(index, ""))
        _apply_row(state, group, row, row_outcome, drawn, now_ns, effects)
    group.ledger.resolve(plan.settles)
    state.quarantine.clear(row.request for row in plan.rows)
    _recover_if_drained(state, group, now_ns, effects)


def _count_later_step(state: SchedulerState, plan: StepPlan) -> None:
    """Later steps of a lease count when they have run: one that is cut never does."""
    state.counters.steps += 1
    for row in plan.rows:
        row.request.timeline.steps += 1


class _Drawn(NamedTuple):
    """What a row yielded; `dead_end`: why its constraint can go no further."""

    tokens: Sequence[int]
    logprobs: PackedLogprobs | None
    positions: RowPositions | None
    dead_end: str = ""


def _fault(row: PlannedRow, drawn: _Drawn) -> str:
    """What its row was owed and did not yield; empty: nothing."""
    sampling, tokens = row.request.sampling, len(drawn.tokens)
    if tokens != row.sample:
        return f"a row with {int(row.sample)} samples returned {tokens} tokens"
    if tokens and sampling.logprobs is not None and not _lists(drawn.logprobs, tokens, sampling.logprobs):
        return f"a token came without the log-probabilities of {sampling.logprobs} alternatives"
    first, reach = row.request.told, _reach(row)
    if row.request.needs_positions and reach > first:
        told = drawn.positions
        if told is None or told.first > first or not _lists(told.logprobs, reach - told.first, sampling.prompt_logprobs):
            return f"log-probabilities of prompt positions {first} to {reach - 1} are missing"
    return ""


def _lists(logprobs: PackedLogprobs | None, positions: int, alternatives: int | None) -> bool:
    return logprobs is not None and len(logprobs) == positions and logprobs.alternatives == alternatives


def _reach(row: PlannedRow) -> int:
    """Prompt positions that are known once the row is computed: its last token's logits are those of the position behind it."""
    return min(row.start + row.count + 1, len(row.request.prompt_ids))


def _tell_positions(row: PlannedRow, positions: RowPositions | None, effects: Effects) -> None:
    """Each position once: what an earlier admission told already is left out."""
    request, reach = row.request, _reach(row)
    if request.needs_positions and positions is not None and reach > request.told:
        effects.told.append(Told(request, request.told, positions.logprobs.piece(request.told - positions.first)))
        request.told = reach


def _apply_row(
    state: SchedulerState,
    group: Group,
    row: PlannedRow,
    outcome: RowOutcome,
    drawn: _Drawn,
    now_ns: int,
    effects: Effects,
) -> None:
    request = row.request
    if outcome is not RowOutcome.OK and outcome in _ROW_ERRORS:
        code, message, param = _ROW_ERRORS[outcome]
        if drawn.dead_end and outcome is RowOutcome.DEAD_END:
            message = f"the constraint can go no further: {drawn.dead_end}"
        state.finish(request, Ending(FinishReason.FAILED, error=TokenloomError(code, message, param=param)), now_ns, effects)
    elif outcome is RowOutcome.NOT_RUN:
        if request.residency is row.residency:
            state.requeue(request, "not_run", now_ns)
    elif row.residency.void:
        return
    elif fault := _fault(row, drawn):
        error = TokenloomError(ErrorCode.PROTOCOL_VIOLATION, fault)
        state.finish(request, Ending(FinishReason.FAILED, error=error), now_ns, effects)
    else:
        if request.residency is row.residency:
            row.residency.computed = row.start + row.count
            if row.prefill and request.prompt_is_computed:
                state.release_children(request, now_ns)
        _tell_positions(row, drawn.positions, effects)
        if drawn.tokens:
            _accept_tokens(state, request, drawn, now_ns, effects)
        if outcome is RowOutcome.CONSTRAINT_COMPLETE and request.state is not RequestState.ENDED:
            stop = request.stops.complete(request.output_ids)
            state.finish(request, Ending(stop.reason, stop=stop), now_ns, effects)
        residency = request.residency
        if residency is not None and residency.computed >= (residency.published + 1) * BLOCK_SIZE and residency.group == group.name:
            _publish_outputs(group, request, residency)


def _accept_tokens(state: SchedulerState, request: Request, drawn: _Drawn, now_ns: int, effects: Effects) -> None:
    tokens, outputs, timeline = drawn.tokens, request.output_ids, request.timeline
    first, logprobs = len(outputs), drawn.logprobs if request.sampling.logprobs is not None else None
    if not timeline.first_token_ns:
        timeline.first_token_ns = now_ns
    timeline.last_token_ns = now_ns
    for count, token in enumerate(tokens, 1):
        outputs.append(token)
        stop = request.stops.push(token, outputs)
        if stop is not None:
            effects.deltas.append(Delta(request, first, tokens[:count], logprobs.piece(0, count) if logprobs is not None else None))
            state.finish(request, Ending(stop.reason, stop=stop), now_ns, effects)
            return
    effects.deltas.append(Delta(request, first, tokens, logprobs))


def _publish_outputs(group: Group, request: Request, residency: Residency) -> None:
    extend_names(request)
    for index in range(residency.published, min(residency.computed // BLOCK_SIZE, len(request.block_names))):
        group.ledger.publish(residency.blocks[index], request.block_names[index])
        residency.published = index + 1


def _apply_failed(state: SchedulerState, group: Group, plan: StepPlan, outcome: StepOutcome, now_ns: int, effects: Effects) -> None:
    group.ledger.withdraw(plan.number)
    _unresolve(plan)
    group.ledger.resolve(plan.settles)
    group.closing.update(plan.closes)
    if outcome.outcome is not BatchOutcome.NOT_RUN and not group.broken and not _smaller_steps_help(state, group, plan, outcome):
        group.suspects = _live(plan)
    group.broken = True
    _recover_if_drained(state, group, now_ns, effects)


def _smaller_steps_help(state: SchedulerState, group: Group, plan: StepPlan, outcome: StepOutcome) -> bool:
    """Whether the batch failed for want of memory and may be smaller: then nobody is suspect, and the group's budget is halved for good."""
    ran_out = outcome.error is not None and outcome.error.code is ErrorCode.OUT_OF_MEMORY
    if not ran_out or not state.limits.chunked_prefill or plan.tokens <= _LEAST_BUDGET:
        return False
    group.most_tokens = max(_LEAST_BUDGET, plan.tokens // 2)
    return True


def _recover_if_drained(state: SchedulerState, group: Group, now_ns: int, effects: Effects) -> None:
    """Once all batches behind a failed one have reported, every request of the group starts over from its confirmed tokens."""
    if not group.broken or group.in_flight:
        return
    group.broken, group.chain_head = False, 0
    for request in list(group.running):
        state.requeue(request, "batch_failed", now_ns)
    suspects, group.suspects = group.suspects, []
    _accuse(state, group.name, [request for request in suspects if request.state is not RequestState.ENDED], now_ns, effects)


def _accuse(state: SchedulerState, group: str, suspects: list[Request], now_ns: int, effects: Effects) -> None:
    poison = state.quarantine.accuse(suspects, group)
    for request in suspects:
        if request is not poison and request not in state.quarantine.suspects and request.state is not RequestState.CHECKING:
            request.wait(WaitReason.QUARANTINE, now_ns)
    if poison is not None:
        error = TokenloomError(ErrorCode.POISON_REQUEST, "the worker failed each time it ran this request alone")
        state.finish(poison, Ending(FinishReason.FAILED, error=error), now_ns, effects)


def _live(plan: StepPlan) -> list[Request]:
    return [row.request for row in plan.rows if row.request.state is not RequestState.ENDED]


def _unresolve(plan: StepPlan) -> None:
    for row in plan.rows:
        row.request.unresolved -= 1
        row.request.unresolved_samples -= row.sample
