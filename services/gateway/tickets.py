"""What this gateway has with the scheduler: one ticket per sequence, and the book that turns frames into news for them.

Pure: no gRPC, no clock, no tasks, so that lost sessions, duplicates, gaps and late cancels are tested without a network.

    submit -> WAITING -> (frame written) SENT -> (ending) ENDED
                 ^______ session lost: attempt + 1 ____|

A ticket ends exactly once: by the scheduler's ending, or by one that the book makes itself where no scheduler can
(never sent, or its session is gone). A cancelled ticket stays as a tombstone until then.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs, TokenLogprobs
from libs.packing import count_ids, pack_ids, unpack_ids
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

# A request whose session died so often while it was accepted is probably what kills schedulers.
MAX_LOSSES = 5
# Bytes of prompts in one frame; far under the 64 MiB of a message.
MAX_FRAME_BYTES = 8 * 1024 * 1024
_RETRY_NS = 200_000_000

FinishReason = common_pb2.FinishReason
CancelReason = common_pb2.CancelReason


class SessionBroken(Exception):
    """The scheduler's frames contradict each other or this book: only a new session helps."""


class TicketState(enum.Enum):
    """Where a ticket is."""

    WAITING = "waiting"
    SENT = "sent"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence from hand-over to ending.

    `submit` holds id, prompt, parameters and trace; attempt, output and remaining deadline are filled in when a frame is built.
    `output` is every token received so far and `taken` how many of them its reader has seen. `logprobs` are those of the others, and
    `prompt_positions` all that came of the prompt's; None: none were asked for. Instants are monotonic nanoseconds;
    `sent_ns` is when a scheduler was sent it last, `lost_ns` are those at which one was lost that had it.
    """

    submit: scheduler_pb2.Submit
    bell: asyncio.Event
    deadline_ns: int | None = None
    on_ended: Callable[[], None] | None = None
    state: TicketState = TicketState.WAITING
    attempt: int = 0
    accepted: bool = False
    sent_ns: int = 0
    lost_ns: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    taken: int = 0
    logprobs: PackedLogprobs | None = None
    prompt_positions: PackedLogprobs | None = None
    cancel_reason: CancelReason.ValueType | None = None
    ending: scheduler_pb2.Ending | None = None
    waiting_since_ns: int = 0
    not_before_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    ended_ns: int = 0

    def __post_init__(self) -> None:
        sampling = self.submit.sampling
        if sampling.HasField("logprobs"):
            self.logprobs = PackedLogprobs(sampling.logprobs)
        if sampling.HasField("prompt_logprobs"):
            self.prompt_positions = PackedLogprobs(sampling.prompt_logprobs)

    @property
    def id(self) -> int:
        """The submit's id, unique within this gateway process."""
        return self.submit.id

    def take(self) -> list[int]:
        """The tokens that arrived since the last call."""
        new = self.output[self.taken :]
        self.taken = len(self.output)
        return new

    def take_logprobs(self) -> list[TokenLogprobs] | None:
        """Those of the tokens that the next `take` gives; None: none were asked for."""
        packed = self.logprobs
        if packed is None:
            return None
        self.logprobs = PackedLogprobs(packed.alternatives)
        return packed.unpack()

    def owned_ending(self, reason: FinishReason.ValueType, *, error: TokenloomError | None = None) -> scheduler_pb2.Ending:
        """The ending that the gateway gives where no scheduler can."""
        return scheduler_pb2.Ending(
            id=self.id,
            attempt=self.attempt,
            reason=reason,
            cancel_reason=self.cancel_reason or CancelReason.CANCEL_REASON_UNSPECIFIED,
            error=error.to_proto() if error else None,
            prompt_tokens=count_ids(self.submit.prompt_ids),
            completion_tokens=len(self.output),
            was_accepted=self.accepted,
        )


class BookObserver:
    """What the book tells about itself; the default tells nobody."""

    def tokens(self, count: int, gap_ns: int) -> None:
        """`count` new tokens of a ticket arrived, `gap_ns` after its previous ones (0: its first)."""

    def resumed(self, ticket: Ticket) -> None:
        """A ticket will be submitted again."""

    def stray(self, kind: str) -> None:
        """A message was for nobody: an unknown id, an old attempt, a foreign session."""


class TicketBook:
    """All live tickets, what must still be sent, and what arrived. `now` arguments are monotonic nanoseconds."""

    def __init__(self, *, resume_timeout_ns: int, observer: BookObserver | None = None) -> None:
        self._resume_timeout_ns = resume_timeout_ns
        self._observer = observer or BookObserver()
        self._live: dict[int, Ticket] = {}
        self._waiting: dict[int, Ticket] = {}
        self._cancels: dict[int, CancelReason.ValueType] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Tickets that no session has carried yet, or not since the last one was lost."""
        return len(self._waiting)

    def next_id(self) -> int:
        """A fresh submit id; never reused."""
        self._last_id += 1
        return self._last_id

    def add(self, ticket: Ticket, now: int) -> None:
        """Takes a new ticket; the next frame carries it."""
        ticket.waiting_since_ns = now
        self._live[ticket.id] = self._waiting[ticket.id] = ticket

    def cancel(self, ticket: Ticket, reason: CancelReason.ValueType, now: int) -> None:
        """Asks for a ticket's end. One that no scheduler holds ends here and now; for the others the ending comes from there."""
        if ticket.state is TicketState.ENDED or ticket.cancel_reason is not None:
            return
        ticket.cancel_reason = reason
        if ticket.state is TicketState.WAITING:
            self._end(ticket, ticket.owned_ending(_reason_of_cancel(reason)), now)
        else:
            self._cancels[ticket.id] = reason

    def next_frame(self, now: int, *, ready: bool) -> scheduler_pb2.GatewayFrame | None:
        """What the session's writer should send, or None. Resubmissions wait until the scheduler is `ready`."""
        frame, size = scheduler_pb2.GatewayFrame(), 0
        for ticket in list(self._waiting.values()):
            if ticket.attempt and (not ready or ticket.not_before_ns > now):
                continue
            if size >= MAX_FRAME_BYTES:
                break
            del self._waiting[ticket.id]
            submit = self._stamped(ticket, now)
            frame.submits.append(submit)
            size += submit.ByteSize()
        for ticket_id, reason in self._cancels.items():
            frame.cancels.add(id=ticket_id, reason=reason)
        self._cancels.clear()
        return frame if frame.submits or frame.cancels else None

    def _stamped(self, ticket: Ticket, now: int) -> scheduler_pb2.Submit:
        ticket.state, ticket.sent_ns = TicketState.SENT, now
        submit = ticket.submit
        submit.attempt = ticket.attempt
        submit.output_ids = pack_ids(ticket.output)
        if ticket.prompt_positions is not None and len(ticket.prompt_positions) == count_ids(submit.prompt_ids):
            submit.sampling.ClearField("prompt_logprobs")  # they are here: a scheduler that goes on need not have them computed again
        if ticket.deadline_ns is not None:
            submit.deadline_remaining_us = max(ticket.deadline_ns - now, 0) // 1000
        return submit

    def receive(self, frame: scheduler_pb2.SchedulerFrame, now: int) -> None:
        """Hands a frame's tokens and endings to their tickets: both of one ticket as one piece of news.

        Raises SessionBroken when arrays disagree in length or tokens are missing.
        """
        self._receive_accepted(frame.accepted)
        self._receive_positions(frame.prompt_positions)
        touched = self._receive_tokens(frame, now)
        for ending in frame.endings:
            ticket = self._live.get(ending.id)
            if ticket is None or ticket.state is not TicketState.SENT or ending.attempt != ticket.attempt:
                self._observer.stray("ending")
            elif not self._resume(ticket, ending, now):
                self._end(ticket, ending, now)
        # Rung last: a reader must never see the tokens of a frame without the ending that came with them.
        for ticket in touched:
            ticket.bell.set()

    def _receive_accepted(self, ids: Iterable[int]) -> None:
        for ticket_id in ids:
            ticket = self._live.get(ticket_id)
            if ticket is None or ticket.state is not TicketState.SENT:
                self._observer.stray("accepted")
            else:
                ticket.accepted = True

    def _receive_positions(self, messages: Iterable[scheduler_pb2.PromptPositions]) -> None:
        for message in messages:
            ticket = self._live.get(message.id)
            if ticket is None or ticket.state is not TicketState.SENT or ticket.prompt_positions is None:
                self._observer.stray("positions")
            else:
                _append(ticket, ticket.prompt_positions, message.first_position, _unpacked(ticket, message.logprobs), "positions")

    def _receive_tokens(self, frame: scheduler_pb2.SchedulerFrame, now: int) -> set[Ticket]:
        ids, firsts, counts = frame.ids, frame.first_indexes, frame.counts
        if not len(ids) == len(firsts) == len(counts) or len(frame.token_ids) != 4 * sum(counts):
            raise SessionBroken("a frame's arrays disagree in length")
        if len(frame.logprobs) not in (0, len(ids)):
            raise SessionBroken(f"a frame with news of {len(ids)} requests has log-probabilities of {len(frame.logprobs)}")
        tokens, start, touched = unpack_ids(frame.token_ids), 0, set()
        for at, (ticket_id, first, count) in enumerate(zip(ids, firsts, counts, strict=True)):
            ticket = self._live.get(ticket_id)
            if ticket is None or ticket.state is not TicketState.SENT:
                self._observer.stray("delta")
            else:
                message = frame.logprobs[at] if frame.logprobs else None
                if self._extend(ticket, first, tokens[start : start + count], message, now):
                    touched.add(ticket)
            start += count
        return touched

    def _extend(self, ticket: Ticket, first: int, tokens: list[int], logprobs: common_pb2.Logprobs | None, now: int) -> bool:
        known = len(ticket.output) - first
        if known < 0:
            raise SessionBroken(f"request {ticket.id}: tokens {len(ticket.output)} to {first - 1} are missing")
        if known >= len(tokens):
            return False
        positions = ticket.prompt_positions
        if positions is not None and len(positions) < count_ids(ticket.submit.prompt_ids):
            raise SessionBroken(f"request {ticket.id}: a token before the prompt's log-probabilities")
        if ticket.logprobs is not None:
            news = _unpacked(ticket, logprobs)
            if len(news) != len(tokens):
                raise SessionBroken(f"request {ticket.id}: {len(tokens)} tokens with log-probabilities of {len(news)}")
            _append(ticket, ticket.logprobs, first - ticket.taken, news, "log-probabilities")
        ticket.output += tokens[known:]
        self._observer.tokens(len(tokens) - known, now - ticket.last_token_ns if ticket.last_token_ns else 0)
        ticket.first_token_ns = ticket.first_token_ns or now
        ticket.last_token_ns = now
        return True

    def lost(self, now: int) -> None:
        """The session is gone, and with it all that it carried: live tickets wait for the next one, cancelled ones end."""
        self._cancels.clear()
        for ticket in list(self._live.values()):
            if ticket.state is not TicketState.SENT:
                continue
            if ticket.cancel_reason is not None:
                self._end(ticket, ticket.owned_ending(_reason_of_cancel(ticket.cancel_reason)), now)
            else:
                self._wait_again(ticket, now, lost=True)

    def _resume(self, ticket: Ticket, ending: scheduler_pb2.Ending, now: int) -> bool:
        """Whether this ending only means that this scheduler cannot go on, so that the ticket waits for the next session instead."""
        if ticket.cancel_reason is not None:
            return False
        if ending.was_accepted:
            if ending.reason != FinishReason.FINISH_REASON_CANCELLED or ending.cancel_reason not in _SCHEDULER_GOES:
                return False
        else:
            code = ErrorCode.from_number(ending.error.code)
            # A scheduler that leaves refuses what comes for the first time too: the one after it will take it.
            if not code.spec.retryable or not (ticket.attempt or code is ErrorCode.DRAINING):
                return False
        ticket.not_before_ns = now + _RETRY_NS
        self._wait_again(ticket, now, lost=ending.was_accepted)
        return True

    def _wait_again(self, ticket: Ticket, now: int, *, lost: bool) -> None:
        if ticket.accepted or not ticket.waiting_since_ns:
            ticket.waiting_since_ns = now
        ticket.state, ticket.accepted = TicketState.WAITING, False
        ticket.attempt += 1
        if lost:
            ticket.lost_ns.append(now)
        self._waiting[ticket.id] = ticket
        if len(ticket.lost_ns) > MAX_LOSSES:
            self._fail(ticket, now, f"the scheduler was lost {len(ticket.lost_ns)} times while it ran this request")
        else:
            self._observer.resumed(ticket)

    def expire(self, now: int) -> None:
        """Fails the tickets that have waited for a session longer than the resume timeout."""
        for ticket in list(self._waiting.values()):
            if now - ticket.waiting_since_ns >= self._resume_timeout_ns:
                self._fail(ticket, now, "the connection to the scheduler was lost and did not return in time")

    def fail_waiting(self, now: int, message: str) -> None:
        """Fails every ticket that no session carries."""
        for ticket in list(self._waiting.values()):
            self._fail(ticket, now, message)

    def _fail(self, ticket: Ticket, now: int, message: str) -> None:
        error = TokenloomError(ErrorCode.SESSION_LOST, message, retry_after_ms=1000)
        self._end(ticket, ticket.owned_ending(FinishReason.FINISH_REASON_FAILED, error=error), now)

    def _end(self, ticket: Ticket, ending: scheduler_pb2.Ending, now: int) -> None:
        ticket.state, ticket.ending, ticket.ended_ns = TicketState.ENDED, ending, now
        self._live.pop(ticket.id, None)
        self._waiting.pop(ticket.id, None)
        self._cancels.pop(ticket.id, None)
        if ticket.on_ended is not None:
            ticket.on_ended()
        ticket.bell.set()


def _unpacked(ticket: Ticket, message: common_pb2.Logprobs | None) -> PackedLogprobs:
    """Raises SessionBroken for none, and for one that contradicts itself."""
    if message is None:
        raise SessionBroken(f"request {ticket.id}: tokens without the log-probabilities that it asks for")
    try:
        return PackedLogprobs.from_proto(message)
    except ValueError as error:
        raise SessionBroken(f"request {ticket.id}: {error}") from error


def _append(ticket: Ticket, kept: PackedLogprobs, first: int, news: PackedLogprobs, what: str) -> None:
    """Appends of `news`, the first of which belongs at `first` of `kept`, what is not there yet. Raises SessionBroken for a gap."""
    known = len(kept) - first
    if known < 0:
        raise SessionBroken(f"request {ticket.id}: {what} {len(kept)} to {first - 1} are missing")
    try:
        kept.extend(news.piece(known))
    except ValueError as error:
        raise SessionBroken(f"request {ticket.id}: {error}") from error


_SCHEDULER_GOES = (CancelReason.CANCEL_REASON_SESSION_LOST, CancelReason.CANCEL_REASON_SHUTDOWN)


def _reason_of_cancel(reason: CancelReason.ValueType) -> FinishReason.ValueType:
    timed_out = reason == CancelReason.CANCEL_REASON_TIMEOUT
    return FinishReason.FINISH_REASON_DEADLINE if timed_out else FinishReason.FINISH_REASON_CANCELLED
