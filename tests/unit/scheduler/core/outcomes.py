"""Answers of a worker as a test writes them, and the short loop that most tests of the core need."""

from __future__ import annotations

from collections.abc import Sequence

from libs.sampling import SamplingParams
from services.scheduler.core.apply import apply
from services.scheduler.core.group import Group
from services.scheduler.core.plan import BatchOutcome, Effects, RowOutcome, StepOutcome, StepPlan, StepTimings
from services.scheduler.core.planner import plan
from services.scheduler.core.request import Request
from services.scheduler.core.state import SchedulerState
from tests.support.core import make_request

TOKEN = 5


def ok(step: StepPlan, *, token: int = TOKEN, rows: Sequence[RowOutcome] | None = None, device_us: int = 0) -> StepOutcome:
    """The batch ran; every row that samples yields `token`."""
    outcomes = rows or [RowOutcome.OK] * len(step.rows)
    tokens = [[token] if row.sample else [] for row in step.rows]
    return StepOutcome(step.epoch, step.number, BatchOutcome.OK, outcomes, tokens, timings=StepTimings(forward_us=device_us))


def failed(step: StepPlan) -> StepOutcome:
    """The batch broke."""
    return StepOutcome(step.epoch, step.number, BatchOutcome.FAILED)


def not_run(step: StepPlan) -> StepOutcome:
    """The batch was refused."""
    return StepOutcome(step.epoch, step.number, BatchOutcome.NOT_RUN)


def planned(state: SchedulerState, group: Group, now: int = 1) -> StepPlan:
    """The next batch, which the test expects to be there."""
    step = plan(state, group, now)
    assert step is not None, f"nothing planned: {[(str(r.key), r.wait_reason) for r in state.requests.values()]}"
    return step


def step(state: SchedulerState, group: Group, now: int = 1, *, token: int = TOKEN) -> tuple[StepPlan, Effects]:
    """Plans one batch and answers it."""
    batch = planned(state, group, now)
    return batch, apply(state, group, ok(batch, token=token), now)


def submit(state: SchedulerState, prompt: Sequence[int], *, max_tokens: int = 8, **fields: object) -> Request:
    """Accepts a request that ignores the end of sequence, so that its length is max_tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request = make_request(state, prompt, params, **fields)  # type: ignore[arg-type]
    state.accept(request)
    return request


def shape(step: StepPlan) -> list[tuple[int, int, int, bool]]:
    """(request id, start, count, sampled) of each row."""
    return [(row.request.key.id, row.start, row.count, row.sample) for row in step.rows]
