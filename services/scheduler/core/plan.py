"""What passes between planning, the wire and applying: plans, outcomes and effects, as plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.errors import TokenloomError
from libs.logprobs import PackedLogprobs
from services.scheduler.core.request import Request, Residency


@dataclass(slots=True, eq=False)
class PlannedRow:
    """One sequence's share of a step: tokens [start, start + count), and whether the last position is sampled.

    `residency` tells rows of an earlier admission apart. `new_blocks` are appended to the slot's block table before the row runs; `named`
    are the blocks that the row fills, with the names under which they are published if it succeeds.
    """

    request: Request
    residency: Residency
    start: int
    count: int
    sample: bool
    new_blocks: Sequence[int]
    named: Sequence[tuple[int, bytes]]
    prefill: bool


@dataclass(frozen=True, slots=True)
class PlannedOpen:
    """A sequence enters its slot in this batch: `computed` tokens lie in the cache already, in the slot's first `blocks`. `constraint`: the
    group's number of the compiled constraint, 0: none."""

    request: Request
    residency: Residency
    computed: int
    blocks: Sequence[int]
    constraint: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """Consecutive steps `first` .. `last` of the same rows that travel in one message, each with a plan of its own (PROTOCOL.md rule 27).

    `granted`: the last step that the worker was given; beyond `last`, which a cut moves, nothing runs. `asked`: a cut is on its way;
    `closed`: the worker has answered it, so that `last` stands.
    """

    first: int
    last: int
    granted: int
    asked: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """The wish that of the lease which began at step `number` nothing runs after `last_step`."""

    epoch: int
    number: int
    last_step: int


@dataclass(slots=True)
class StepPlan:
    """A batch, or one step of a leased one: what one group does in step `number`. Results are resolved through it, never through slots.

    `lease`: None for a batch of one step.
    """

    group: str
    epoch: int
    number: int
    predecessor: int
    rows: list[PlannedRow] = field(default_factory=list)
    opens: list[PlannedOpen] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    planned_ns: int = 0
    lease: Lease | None = None

    @property
    def steps(self) -> int:
        """Steps that its message grants."""
        return 1 if self.lease is None else self.lease.granted - self.lease.first + 1

    @property
    def is_later(self) -> bool:
        """Whether it travelled in the message of an earlier step."""
        return self.lease is not None and self.number > self.lease.first

    @property
    def settles(self) -> int:
        """The step up to which everything is over once this one is: the last of a lease that was cut stands for those that never run."""
        return self.lease.granted if self.lease is not None and self.number == self.lease.last else self.number

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.count for row in self.rows)

    @property
    def is_mixed(self) -> bool:
        """Whether prefill and decode rows share the step."""
        return any(row.prefill for row in self.rows) and not all(row.prefill for row in self.rows)


class BatchOutcome(enum.Enum):
    """What became of a batch as a whole."""

    OK = "ok"
    NOT_RUN = "not_run"
    FAILED = "failed"


class RowOutcome(enum.Enum):
    """What became of one row of a batch that ran."""

    OK = "ok"
    CONSTRAINT_COMPLETE = "constraint_complete"
    DEAD_END = "dead_end"
    NON_FINITE = "non_finite"
    NOT_RUN = "not_run"
    FAILED = "failed"
    REFUSED_ARGS = "refused_args"


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The worker's own account of a step, in microseconds."""

    queued_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    total_us: int = 0
    idle_us: int = 0


class RowPositions(NamedTuple):
    """Log-probabilities of consecutive prompt positions, the first of which is `first`, as one row yielded them."""

    first: int
    logprobs: PackedLogprobs


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A worker's answer to one batch: row outcomes, tokens and their log-probabilities (empty: nobody asked) in the order of the plan's
    rows; prompt positions, and why a constraint is at a dead end where its worker knows more than that, by the row's index.
    """

    epoch: int
    number: int
    outcome: BatchOutcome
    rows: Sequence[RowOutcome] = ()
    tokens: Sequence[Sequence[int]] = ()
    error: TokenloomError | None = None
    timings: StepTimings = StepTimings()
    logprobs: Sequence[PackedLogprobs] = ()
    positions: Mapping[int, RowPositions] = field(default_factory=dict)
    dead_ends: Mapping[int, str] = field(default_factory=dict)


class Delta(NamedTuple):
    """New output tokens of a request, with their log-probabilities if it asked for them; `first_index`: the first one's output index."""

    request: Request
    first_index: int
    tokens: Sequence[int]
    logprobs: PackedLogprobs | None = None


class Told(NamedTuple):
    """Log-probabilities of a request's prompt, from position `first` on; before its first delta."""

    request: Request
    first: int
    logprobs: PackedLogprobs


@dataclass(slots=True)
class Effects:
    """What the outside must learn after an event. An ended request's last delta is in `deltas` too."""

    deltas: list[Delta] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
