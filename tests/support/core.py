"""Builders for the scheduler's core under test."""

from __future__ import annotations

from collections.abc import Sequence

from libs.blocks import block_hashes
from libs.constraints import Constraint
from libs.sampling import SamplingParams
from services.scheduler.core.group import Group
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import Request, RequestKey, Timeline
from services.scheduler.core.state import Limits, SchedulerState
from services.scheduler.core.stopping import StopRules, StopTracker
from tests.support.model_worker import EOS, text_table

RULES = StopRules((EOS,), max_model_len=128, table=text_table())


def make_state(policy: Policy = Policy.FCFS, **limits: object) -> SchedulerState:
    """A state with small limits; keyword arguments replace fields of Limits."""
    values = {"max_tokens_per_step": 32, "max_sequences": 8, "max_requests": 100, "max_model_len": RULES.max_model_len, **limits}
    return SchedulerState(Limits(**values), policy)  # type: ignore[arg-type]


def add_group(state: SchedulerState, name: str = "g0", *, epoch: int = 1, blocks: int = 8, slots: int = 8, in_flight: int = 2) -> Group:
    """Attaches an empty group."""
    state.groups[name] = Group.new(name, epoch, num_blocks=blocks, num_slots=slots, max_in_flight=in_flight)
    return state.groups[name]


def make_request(
    state: SchedulerState,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    number: int = 0,
    outputs: Sequence[int] = (),
    deadline_ns: int | None = None,
    cacheable: bool = True,
    priority: int = 0,
    parent: Request | None = None,
    attempt: int = 0,
    constraint: Constraint | None = None,
) -> Request:
    """A request as the shell would build it; not yet accepted."""
    arrival = state.next_arrival()
    params = sampling or SamplingParams(max_tokens=8, temperature=0)
    stops = StopTracker(RULES, params, len(prompt))
    for index in range(len(outputs)):
        stops.push(outputs[index], outputs[: index + 1])
    names = block_hashes(prompt) if cacheable else []
    return Request(
        RequestKey(7, number or arrival),
        attempt,
        arrival,
        list(prompt),
        params,
        stops,
        Timeline(received_ns=arrival),
        output_ids=list(outputs),
        block_names=names,
        cacheable=bool(names),
        deadline_ns=deadline_ns,
        priority=priority,
        parent=parent.key if parent else None,
        constraint=constraint,
    )
