"""One sequence as its gateway knows it, and which refusals and endings are right for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.blocks import BLOCK_SIZE, block_hashes, blocks_for, chain_hash, root_hash
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from libs.packing import pack_ids
from services.scheduler.core.naming import private_names
from services.scheduler.core.plan import Effects
from services.scheduler.core.quarantine import CRASHES_ALONE
from services.scheduler.core.request import Request, RequestKey
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.logprobs import told_all
from tests.support.model_constraints import is_complete
from tests.support.model_worker import EOS
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

# What a row's bad outcome may mean to its request.
_ROW_ERRORS = {
    worker_pb2.ROW_OUTCOME_FAILED: ErrorCode.STEP_FAILED,
    worker_pb2.ROW_OUTCOME_NON_FINITE: ErrorCode.NON_FINITE,
    worker_pb2.ROW_OUTCOME_DEAD_END: ErrorCode.DEAD_END,
    worker_pb2.ROW_OUTCOME_REFUSED_ARGS: ErrorCode.INVALID_REQUEST,
}


@dataclass(eq=False, slots=True)
class Client:
    """What it must get, what it has, which endings it may see and which one it saw.

    `request`: the current attempt; `waits_for`: its parent, until that one's prompt is computed or it has ended. `names`: its blocks',
    outputs included. `told`: prompt positions that this attempt has told. `may_fail`: errors that the worker's answers give a reason for.
    `crashes`: batches of this attempt that failed since one of them succeeded; `poison`: all will. `over`: its ending came; `lost`: its
    session broke, nobody holds it.
    """

    submit: scheduler_pb2.Submit
    gateway: int
    prompt: list[int]
    want: list[int]
    salt: bytes
    constraint: Constraint | None = None
    names: list[bytes] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    request: Request = field(init=False)
    told: int = 0
    waits_for: Request | None = None
    cancelled: bool = False
    may_complete: bool = False
    may_fail: set[ErrorCode] = field(default_factory=set)
    crashes: int = 0
    poison: bool = False
    over: bool = False
    lost: bool = False

    def begin(self, request: Request) -> None:
        """A new attempt."""
        self.request = request
        self.cancelled = self.may_complete = self.over = self.lost = False
        self.may_fail, self.crashes, self.told = set(), 0, 0

    @property
    def needs_positions(self) -> bool:
        """Whether its prompt's log-probabilities are asked for, and some are still to come."""
        return self.submit.sampling.HasField("prompt_logprobs") and self.told < len(self.prompt)

    def hear_positions(self, first: int, logprobs: PackedLogprobs) -> None:
        """Log-probabilities of its prompt from position `first` on: those that follow, each as the model tells it."""
        assert first == self.told, "a prompt position was left out or came twice"
        assert logprobs.to_proto() == told_all(first, self.prompt[first : first + len(logprobs)], self._asked("prompt_logprobs")).to_proto()
        self.told += len(logprobs)
        assert self.told <= len(self.prompt)

    def check_logprobs(self, first: int, tokens: Sequence[int], logprobs: PackedLogprobs | None) -> None:
        """That output tokens come with their log-probabilities, if they were asked for, and behind all of the prompt's."""
        assert not self.needs_positions, "a token came before the prompt's positions"
        asked = self._asked("logprobs")
        wanted = told_all(len(self.prompt) + first, tokens, asked) if asked is not None else None
        assert logprobs == wanted, "not the token's log-probabilities"

    def _asked(self, name: str) -> int | None:
        sampling = self.submit.sampling
        return getattr(sampling, name) if sampling.HasField(name) else None

    def ask(self) -> None:
        """What it is handed over with: its output, behind the first token of which it has all of its prompt's log-probabilities."""
        self.submit.output_ids = pack_ids(self.got)
        if self.got:
            self.submit.sampling.ClearField("prompt_logprobs")

    def go_on(self) -> None:
        """It resumes. One that has a whole sentence already, and only missed its ending, is given the end of sequence, which is no text."""
        if self.constraint is not None and is_complete(self.constraint, self.got) and self.got == self.want and self.got[-1] != EOS:
            self.want = [*self.got, EOS]

    def name_blocks(self, *, private: bool) -> None:
        """The names of all blocks that it will fill. `private`: without a prefix cache they are its family's own from the start."""
        tokens, known = [*self.prompt, *self.want], [*self.prompt, *self.got]
        names = block_hashes(known, self.salt)
        if private:
            names = private_names(names, RequestKey(self.gateway, self.submit.parent_id or self.submit.id))
        for start in range(len(names) * BLOCK_SIZE, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            names.append(chain_hash(names[-1] if names else root_hash(self.salt), tokens[start : start + BLOCK_SIZE]))
        self.names = names

    def reads(self, request: Request) -> bool:
        """Whether this is the attempt whose news the client is to get."""
        return request is self.request and not self.over and not self.lost

    def look_at_parent(self, parent: Request | None) -> None:
        """Remembers that it may start, once it may: that its parent falls back later does not matter."""
        self.waits_for = None if parent is None or parent.ending is not None or parent.prompt_is_computed else parent

    def look_at_row(self, request: Request, outcome: int, *, forced: bool) -> None:
        """A worker gives a row of `request` this outcome: what may become of it. `forced`: though no constraint was complete."""
        if request is self.request:
            self.may_fail |= {_ROW_ERRORS[outcome]} if outcome in _ROW_ERRORS else set()
            self.may_complete |= forced and outcome == worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE

    def count_crash(self, request: Request, *, failed: bool) -> None:
        """A batch with `request` has failed, or has not: how often in a row."""
        if request is self.request:
            self.crashes = self.crashes + 1 if failed else 0

    def may_have_missed_its_ending(self, unread: int) -> bool:
        """Whether this one, which has finished, is taken to have lost its ending with the session: one in four, so that most stay over."""
        ending = self.request.ending
        natural = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONSTRAINT_COMPLETE)
        finished = ending is not None and ending.reason in natural and self.got == self.want
        return finished and (len(self.want) + unread) % 4 == 0


def cannot_fit(state: SchedulerState, request: Request) -> bool:
    """Whether groups are there and none of them holds the request alone."""
    largest = max((group.ledger.num_blocks for group in state.groups.values()), default=None)
    return largest is not None and blocks_for(len(request.prompt_ids) + request.stops.max_output - 1) > largest


def why_refused(state: SchedulerState, request: Request) -> ErrorCode | None:
    """What `accept` must refuse the request with; None: it must take it, as it must whoever is resumed."""
    if request.attempt:
        return None
    if len(request.prompt_ids) >= state.limits.max_model_len:
        return ErrorCode.PROMPT_TOO_LONG
    if cannot_fit(state, request):
        return ErrorCode.CANNOT_FIT
    bound = state.limits.max_live_tokens
    tokens = sum(live.most_tokens for live in [*state.requests.values(), request])
    full = len(state.requests) >= state.limits.max_requests or (bound and state.requests and tokens > bound)
    return ErrorCode.QUEUE_FULL if full else None


def refusal_of(state: SchedulerState, request: Request) -> tuple[ErrorCode | None, Effects]:
    """What the core refuses the request with; None: it has taken it, with these effects."""
    try:
        return None, state.accept(request)
    except TokenloomError as error:
        return error.code, Effects()


def check_ending(client: Client, state: SchedulerState, now_ns: int) -> str:
    """That a client's ending has a reason; returns its name."""
    ending = client.request.ending
    assert ending is not None
    match ending.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            assert client.got == client.want, "ended before its end"
        case FinishReason.CONSTRAINT_COMPLETE:
            assert client.may_complete or client.got == client.want, "ended before its constraint was complete"
        case FinishReason.CANCELLED:
            assert client.cancelled
        case FinishReason.DEADLINE:
            due = client.request.deadline_ns
            assert client.cancelled or (due is not None and due <= now_ns)
        case FinishReason.FAILED:
            assert ending.error is not None
            return _check_failure(client, state, ending.error.code)
    return ending.reason.name


def _check_failure(client: Client, state: SchedulerState, code: ErrorCode) -> str:
    match code:
        case ErrorCode.POISON_REQUEST:
            assert client.crashes >= CRASHES_ALONE, "convicted of too few crashes"
        case ErrorCode.CANNOT_FIT:
            assert cannot_fit(state, client.request)
        case _:
            assert code in client.may_fail, f"failed without a reason: {code.name}"
    return code.name
