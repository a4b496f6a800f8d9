"""Under every order of tokens, duplicates, losses, cancels, endings and refusals each token is received once and each ticket ends once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import TokenLogprobs
from libs.packing import count_ids, pack_ids
from services.gateway.tickets import CancelReason, FinishReason, Ticket, TicketBook, TicketState
from tests.support.logprobs import told_all
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

pytestmark = pytest.mark.composes("session loss", "cancel")
PROMPT = [7, 8, 9]
TRUTH = list(range(1000, 1064))
SECOND = 1_000_000_000


class BookMachine(RuleBasedStateMachine):
    """A model scheduler per session that generates TRUTH for everyone, beside the book."""

    @initialize()
    def begin(self) -> None:
        self.book = TicketBook(resume_timeout_ns=30 * SECOND)
        self.tickets: list[Ticket] = []
        self.ended: dict[int, int] = {}
        self.read: dict[int, list[TokenLogprobs]] = {}
        # Requests whose prompt the current session's scheduler has yet to tell.
        self.untold: set[int] = set()
        # What the current session's scheduler runs: id -> (attempt, tokens generated).
        self.running: dict[int, tuple[int, int]] = {}
        self.now = SECOND

    @rule(asks=st.booleans())
    def submit(self, asks: bool) -> None:
        sampling = common_pb2.SamplingParams(logprobs=1, prompt_logprobs=1) if asks else None
        submit = scheduler_pb2.Submit(id=self.book.next_id(), prompt_ids=pack_ids(PROMPT), sampling=sampling)
        ticket = Ticket(submit, asyncio.Event())
        self.read[ticket.id] = []
        ticket.on_ended = lambda: self.ended.__setitem__(ticket.id, self.ended.get(ticket.id, 0) + 1)
        self.tickets.append(ticket)
        self.book.add(ticket, self.now)

    @rule(ready=st.booleans())
    def write_frame(self, ready: bool) -> None:
        frame = self.book.next_frame(self.now, ready=ready)
        if frame is None:
            return
        for submit in frame.submits:
            assert submit.id not in self.running, "submitted twice in one session"
            self.running[submit.id] = (submit.attempt, count_ids(submit.output_ids))
            if submit.sampling.HasField("prompt_logprobs"):
                self.untold.add(submit.id)
        reply = scheduler_pb2.SchedulerFrame(accepted=[submit.id for submit in frame.submits])
        for cancel in frame.cancels:
            if cancel.id in self.running:
                reply.endings.append(self._ending(cancel.id, FinishReason.FINISH_REASON_CANCELLED, cancel_reason=cancel.reason))
        self.book.receive(reply, self.now)

    def _ending(self, submit_id: int, reason, **values) -> scheduler_pb2.Ending:
        attempt, _ = self.running.pop(submit_id)
        return scheduler_pb2.Ending(**{"id": submit_id, "attempt": attempt, "reason": reason, "was_accepted": True, **values})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5), back=st.integers(0, 3), finish=st.booleans())
    def step(self, data, count: int, back: int, finish: bool) -> None:
        submit_id = data.draw(st.sampled_from(sorted(self.running)))
        attempt, generated = self.running[submit_id]
        first = max(0, generated - back)
        tokens = TRUTH[first : generated + count]
        self.running[submit_id] = (attempt, min(generated + count, len(TRUTH)))
        frame = scheduler_pb2.SchedulerFrame(ids=[submit_id], first_indexes=[first], counts=[len(tokens)], token_ids=pack_ids(tokens))
        frame.logprobs.append(told_all(len(PROMPT) + first, tokens, 1).to_proto())
        if submit_id in self.untold:
            self.untold.discard(submit_id)
            frame.prompt_positions.add(id=submit_id, logprobs=told_all(0, PROMPT, 1).to_proto())
        if finish or generated + count >= len(TRUTH):
            frame.endings.append(self._ending(submit_id, FinishReason.FINISH_REASON_STOP))
        self.book.receive(frame, self.now)

    @precondition(lambda self: self.untold & self.running.keys())
    @rule(data=st.data(), first=st.integers(0, 1))
    def tell_some_of_a_prompt(self, data, first: int) -> None:
        submit_id = data.draw(st.sampled_from(sorted(self.untold & self.running.keys())))
        known = next(ticket.prompt_positions for ticket in self.tickets if ticket.id == submit_id)
        first = min(first, len(known or ()))
        frame = scheduler_pb2.SchedulerFrame()
        frame.prompt_positions.add(id=submit_id, first_position=first, logprobs=told_all(first, PROMPT[first:2], 1).to_proto())
        self.book.receive(frame, self.now)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def read_what_came(self, data) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        logprobs, tokens = ticket.take_logprobs(), ticket.take()
        assert (logprobs is None) == (not ticket.submit.sampling.HasField("logprobs"))
        assert logprobs is None or len(logprobs) == len(tokens)
        self.read[ticket.id] += logprobs or ()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), shutdown=st.booleans())
    def refuse_or_shut_down(self, data, shutdown: bool) -> None:
        submit_id = data.draw(st.sampled_from(sorted(self.running)))
        if shutdown:
            ending = self._ending(submit_id, FinishReason.FINISH_REASON_CANCELLED, cancel_reason=CancelReason.CANCEL_REASON_SHUTDOWN)
        else:
            error = TokenloomError(ErrorCode.NO_WORKER, "none").to_proto()
            ending = self._ending(submit_id, FinishReason.FINISH_REASON_FAILED, error=error, was_accepted=False)
        self.book.receive(scheduler_pb2.SchedulerFrame(endings=[ending]), self.now)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.book.cancel(data.draw(st.sampled_from(self.tickets)), CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED, self.now)

    @rule()
    def lose_session(self) -> None:
        self.running.clear()
        self.untold.clear()
        self.book.lost(self.now)

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)
        self.book.expire(self.now)

    @invariant()
    def tokens_are_the_truth_each_once(self) -> None:
        for ticket in getattr(self, "tickets", []):
            assert ticket.output == TRUTH[: len(ticket.output)]

    @invariant()
    def log_probabilities_are_told_with_their_tokens_and_once(self) -> None:
        for ticket in getattr(self, "tickets", []):
            if ticket.logprobs is None:
                continue
            waiting = [*self.read[ticket.id], *ticket.logprobs.unpack()]
            assert waiting == told_all(len(PROMPT), ticket.output, 1).unpack()
            positions = ticket.prompt_positions
            assert positions is not None
            assert positions == told_all(0, PROMPT[: len(positions)], 1)
            assert not ticket.output or len(positions) == len(PROMPT)

    @invariant()
    def a_ticket_is_live_or_has_ended_exactly_once(self) -> None:
        for ticket in getattr(self, "tickets", []):
            over = ticket.state is TicketState.ENDED
            assert (ticket.ending is not None) == over
            assert self.ended.get(ticket.id, 0) == int(over)
        if hasattr(self, "book"):
            assert len(self.book) == sum(ticket.state is not TicketState.ENDED for ticket in self.tickets)

    def teardown(self) -> None:
        """Whatever happened, losing the session and waiting ends everything."""
        if hasattr(self, "book"):
            self.lose_session()
            self.now += 31 * SECOND
            self.book.expire(self.now)
            assert len(self.book) == 0


TestBook = BookMachine.TestCase
