"""A request from its arrival to its one ending.

    prompt_ids                              output_ids
    |---------------------------------------|-----------|~~~|
    0            computed                    known       planned_known
                    (KV written, confirmed)              (with samples in flight)

`computed <= known <= planned_known`: every step closes the gap between what is computed and what is known. Chunked prefill,
prefix hits, preemption and dispatch-ahead are all this one idea.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.blocks import blocks_for
from libs.constraints import Constraint
from libs.errors import TokenloomError
from libs.sampling import SamplingParams
from services.scheduler.core.checks import Check
from services.scheduler.core.stopping import FinishReason, Stop, StopTracker


class RequestKey(NamedTuple):
    """The mesh's own name of a request: gateway instance and that instance's counter."""

    gateway: int
    id: int

    def __str__(self) -> str:
        return f"{self.gateway:x}:{self.id}"


class RequestState(enum.Enum):
    """Where a request is. A preempted or migrated request is WAITING again; CHECKING is who waits for its constraint to be compiled."""

    CHECKING = "checking"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS = {
    RequestState.CHECKING: (RequestState.WAITING, RequestState.ENDED),
    RequestState.WAITING: (RequestState.CHECKING, RequestState.RUNNING, RequestState.ENDED),
    RequestState.RUNNING: (RequestState.WAITING, RequestState.ENDED),
    RequestState.ENDED: (),
}


class WaitReason(enum.Enum):
    """Why a request does not run in this step."""

    NEW = "new"
    NO_WORKER = "no_worker"
    TOKEN_BUDGET = "token_budget"
    NO_SLOT = "no_slot"
    NO_BLOCKS = "no_blocks"
    DRAINING_BLOCKS = "draining_blocks"
    PREFIX_IN_FLIGHT = "prefix_in_flight"
    UNRESOLVED = "unresolved"
    PARENT_PROMPT = "parent_prompt"
    GROUP_TOO_SMALL = "group_too_small"
    BEHIND = "behind_another"
    QUARANTINE = "quarantine"
    CHECKING = "checking"


class CancelReason(enum.Enum):
    """Who asked for an early end."""

    CLIENT_DISCONNECTED = "client_disconnected"
    SLOW_READER = "slow_reader"
    TIMEOUT = "timeout"
    SESSION_LOST = "session_lost"
    SHUTDOWN = "shutdown"
    SIBLING_FAILED = "sibling_failed"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something worth seeing in the request's trace."""

    name: str
    at_ns: int
    detail: str = ""
    amount: int = 0


@dataclass(slots=True)
class Timeline:
    """Instants (monotonic ns; 0: not yet) and sums of a request's life."""

    received_ns: int
    dispatched_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    ended_ns: int = 0
    steps: int = 0
    chunks: int = 0
    preemptions: int = 0
    device_us: int = 0
    events: list[RequestEvent] = field(default_factory=list)

    MAX_EVENTS = 128

    def note(self, event: RequestEvent) -> None:
        """Keeps an event for the trace; beyond MAX_EVENTS the later ones are dropped."""
        if len(self.events) < self.MAX_EVENTS:
            self.events.append(event)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    reason: FinishReason
    stop: Stop | None = None
    cancel: CancelReason | None = None
    error: TokenloomError | None = None


@dataclass(slots=True)
class Residency:
    """A running request's place in one worker group. A new one for every admission, so that rows of an older one are told apart.

    `rank`: its place among those that run there, fixed at admission (Policy.rank). `blocks` is the block table; its first `published` are
    named or came from the prefix cache. `computed`: tokens whose KV is confirmed;
    `planned`: the same with all batches in flight; `last_batch`: the newest batch it stands in. `opened`: the worker has been told.
    `void`: one of its rows was not computed, so that what later rows in flight yield means nothing.
    """

    group: str
    rank: tuple[int, int]
    slot: int
    blocks: list[int]
    computed: int
    planned: int
    published: int
    last_batch: int = 0
    opened: bool = False
    void: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the core changes it; the shell reads it.

    `block_names` are the chained hashes of its full blocks known so far (empty and `cacheable` False: no cache). `unresolved`: rows in
    flight, over all residencies; a request with unresolved rows is not admitted again. `parent`: the first choice of the same HTTP
    request, whose prompt this one shares; None for a first choice. `cached_tokens`: prompt tokens found in the prefix cache when it was
    first admitted; of a first choice only, and `counted` once they are in the counters. `told`: prompt positions whose log-probabilities
    have been emitted. `crashes`: times a batch with this request alone in
    it failed since its last progress. `constraint`: what its output must keep to, None: nothing; `check`: its entry in the table of what is
    compiled where, while it is live.
    """

    key: RequestKey
    attempt: int
    arrival: int
    prompt_ids: list[int]
    sampling: SamplingParams
    stops: StopTracker
    timeline: Timeline
    output_ids: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    cacheable: bool = False
    deadline_ns: int | None = None
    priority: int = 0
    tenant: str = ""
    parent: RequestKey | None = None
    constraint: Constraint | None = None
    check: Check | None = None
    state: RequestState = RequestState.WAITING
    wait_reason: WaitReason = WaitReason.NEW
    residency: Residency | None = None
    unresolved: int = 0
    unresolved_samples: int = 0
    cached_tokens: int = 0
    counted: bool = False
    told: int = 0
    was_admitted: bool = False
    crashes: int = 0
    ending: Ending | None = None

    @property
    def known(self) -> int:
        """Tokens whose ids are confirmed."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Upper bound of `known`: prompt plus the most output it may have."""
        return len(self.prompt_ids) + self.stops.max_output

    @property
    def most_blocks(self) -> int:
        """KV blocks that hold all of it: its last token is never computed."""
        return blocks_for(self.most_tokens - 1)

    @property
    def is_resumed(self) -> bool:
        """Whether a client may have some of its output already, so that it should rather wait than fail."""
        return self.attempt > 0 or self.was_admitted

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the KV of the whole prompt lies, confirmed, where the request runs."""
        return self.residency is not None and self.residency.computed >= len(self.prompt_ids)

    @property
    def needs_positions(self) -> bool:
        """Whether log-probabilities of its prompt are yet to be emitted: then every token of it is computed (PROTOCOL.md rule 6)."""
        return self.sampling.prompt_logprobs is not None and self.told < len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that a step could compute now: 1 for a decode, more for a prefill, 0 when the rest is in flight.

        0 too once its last output token is planned: nothing is computed past prompt + max_tokens - 1 (PROTOCOL.md rule 5).
        """
        residency, outputs = self.residency, len(self.output_ids) + self.unresolved_samples
        if residency is None or outputs >= self.stops.max_output:
            return 0
        return len(self.prompt_ids) + outputs - residency.planned

    def move(self, state: RequestState) -> None:
        """Changes the state. Raises ValueError for a transition that the table does not know."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.key}: {self.state.value} -> {state.value}")
        self.state = state

    def wait(self, reason: WaitReason, now_ns: int) -> None:
        """Remembers why it does not run in this step; changes of the reason are kept for the trace."""
        if reason is not self.wait_reason:
            self.wait_reason = reason
            self.timeline.note(RequestEvent("waiting", now_ns, reason.value))

    def token_at(self, position: int) -> int:
        """The confirmed token at `position`, counted over prompt and output."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt else self.output_ids[position - prompt]
