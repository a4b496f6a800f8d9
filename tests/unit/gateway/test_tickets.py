"""The book of tickets: exactly one ending each, every token once, whatever happens to sessions."""

from __future__ import annotations

import asyncio

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from services.gateway.tickets import (
    MAX_FRAME_BYTES,
    MAX_LOSSES,
    BookObserver,
    CancelReason,
    FinishReason,
    SessionBroken,
    Ticket,
    TicketBook,
    TicketState,
)
from tokenloom.scheduler.v1 import scheduler_pb2

SECOND = 1_000_000_000
GONE = CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED


class Seen(BookObserver):
    def __init__(self) -> None:
        self.strays: list[str] = []
        self.gaps: list[tuple[int, int]] = []
        self.resumptions = 0

    def tokens(self, count, gap_ns):
        self.gaps.append((count, gap_ns))

    def resumed(self, ticket):
        self.resumptions += 1

    def stray(self, kind):
        self.strays.append(kind)


class Bench:
    """A book, a ticket in it, and short words for what a scheduler says."""

    def __init__(self, *, deadline_ns: int | None = None) -> None:
        self.seen = Seen()
        self.book = TicketBook(resume_timeout_ns=30 * SECOND, observer=self.seen)
        self.released = 0
        self.now = SECOND
        self.ticket = self.new_ticket(deadline_ns)

    def new_ticket(self, deadline_ns: int | None = None) -> Ticket:
        submit = scheduler_pb2.Submit(id=self.book.next_id(), prompt_ids=pack_ids([1, 2, 3]))
        ticket = Ticket(submit, asyncio.Event(), deadline_ns=deadline_ns, on_ended=self._release)
        self.book.add(ticket, self.now)
        return ticket

    def _release(self) -> None:
        self.released += 1

    def send(self, *, ready: bool = True) -> scheduler_pb2.GatewayFrame | None:
        frame = self.book.next_frame(self.now, ready=ready)
        return None if frame is None else scheduler_pb2.GatewayFrame.FromString(frame.SerializeToString())

    def accept(self) -> None:
        self.book.receive(scheduler_pb2.SchedulerFrame(accepted=[self.ticket.id]), self.now)

    def tokens(self, first: int, tokens: list[int], ending: scheduler_pb2.Ending | None = None) -> None:
        frame = scheduler_pb2.SchedulerFrame(
            ids=[self.ticket.id],
            first_indexes=[first],
            counts=[len(tokens)],
            token_ids=pack_ids(tokens),
            endings=[ending] if ending else [],
        )
        self.book.receive(frame, self.now)

    def ending(self, reason=FinishReason.FINISH_REASON_STOP, **values) -> scheduler_pb2.Ending:
        return scheduler_pb2.Ending(
            **{"id": self.ticket.id, "attempt": self.ticket.attempt, "reason": reason, "was_accepted": True, **values}
        )

    def end(self, reason=FinishReason.FINISH_REASON_STOP, **values) -> None:
        self.book.receive(scheduler_pb2.SchedulerFrame(endings=[self.ending(reason, **values)]), self.now)


def test_a_new_ticket_travels_in_the_next_frame_and_only_once():
    bench = Bench()
    frame = bench.send()
    assert [(submit.id, submit.attempt, unpack_ids(submit.prompt_ids)) for submit in frame.submits] == [(1, 0, [1, 2, 3])]
    assert bench.ticket.state is TicketState.SENT
    assert bench.send() is None


def test_the_deadline_travels_as_what_is_left_of_it():
    bench = Bench(deadline_ns=4 * SECOND)
    bench.now = 3 * SECOND
    assert bench.send().submits[0].deadline_remaining_us == 1_000_000


def test_without_a_deadline_none_is_sent():
    assert not Bench().send().submits[0].HasField("deadline_remaining_us")


@pytest.mark.parametrize("large", ["prompt", "constraint"])
def test_large_submits_are_spread_over_frames(large):
    bench = Bench()
    second = bench.new_ticket()
    if large == "prompt":
        bench.ticket.submit.prompt_ids = bytes(MAX_FRAME_BYTES)
    else:
        bench.ticket.submit.constraint.regex = "a" * MAX_FRAME_BYTES
    assert [submit.id for submit in bench.send().submits] == [bench.ticket.id]
    assert [submit.id for submit in bench.send().submits] == [second.id]


def test_tokens_are_taken_once_and_pile_up_until_they_are():
    bench = Bench()
    bench.send()
    bench.tokens(0, [10])
    bench.tokens(1, [11, 12])
    assert bench.ticket.bell.is_set()
    assert bench.ticket.take() == [10, 11, 12]
    assert bench.ticket.take() == []


def test_tokens_that_are_known_already_are_dropped():
    bench = Bench()
    bench.send()
    bench.tokens(0, [10, 11])
    bench.tokens(0, [10, 11])
    bench.tokens(1, [11, 12])
    assert bench.ticket.output == [10, 11, 12]


def test_a_gap_breaks_the_session():
    bench = Bench()
    bench.send()
    bench.tokens(0, [10])
    with pytest.raises(SessionBroken, match="tokens 1 to 1 are missing"):
        bench.tokens(2, [12])


@pytest.mark.parametrize(
    "frame",
    [
        scheduler_pb2.SchedulerFrame(ids=[1], first_indexes=[0], counts=[]),
        scheduler_pb2.SchedulerFrame(ids=[1], first_indexes=[0, 1], counts=[1], token_ids=bytes(4)),
        scheduler_pb2.SchedulerFrame(ids=[1], first_indexes=[0], counts=[2], token_ids=bytes(4)),
        scheduler_pb2.SchedulerFrame(token_ids=bytes(4)),
    ],
)
def test_arrays_that_disagree_break_the_session(frame):
    bench = Bench()
    bench.send()
    with pytest.raises(SessionBroken, match="disagree"):
        bench.book.receive(frame, bench.now)


def test_the_ending_is_there_before_the_reader_sees_the_tokens_that_came_with_it():
    bench = Bench()
    bench.send()
    bench.tokens(0, [10], bench.ending())
    assert bench.ticket.bell.is_set()
    assert (bench.ticket.output, bench.ticket.ending.reason) == ([10], FinishReason.FINISH_REASON_STOP)


def test_a_ticket_ends_once_and_gives_its_lease_back_once():
    bench = Bench()
    bench.send()
    bench.end()
    bench.end(FinishReason.FINISH_REASON_LENGTH)
    assert bench.ticket.ending.reason == FinishReason.FINISH_REASON_STOP
    assert bench.released == 1
    assert bench.seen.strays == ["ending"]
    assert len(bench.book) == 0


def test_messages_for_unknown_requests_are_counted_and_ignored():
    bench = Bench()
    bench.book.receive(
        scheduler_pb2.SchedulerFrame(
            accepted=[99], ids=[99], first_indexes=[0], counts=[1], token_ids=bytes(4), endings=[scheduler_pb2.Ending(id=99)]
        ),
        bench.now,
    )
    assert sorted(bench.seen.strays) == ["accepted", "delta", "ending"]


def test_cancelling_before_anything_was_sent_ends_at_once_and_sends_nothing():
    bench = Bench()
    bench.book.cancel(bench.ticket, GONE, bench.now)
    assert bench.ticket.ending.reason == FinishReason.FINISH_REASON_CANCELLED
    assert bench.ticket.ending.cancel_reason == GONE
    assert not bench.ticket.ending.was_accepted
    assert bench.send() is None


def test_a_cancelled_ticket_waits_for_the_scheduler_whose_ending_wins():
    bench = Bench()
    bench.send()
    bench.book.cancel(bench.ticket, GONE, bench.now)
    assert bench.ticket.ending is None
    assert [(cancel.id, cancel.reason) for cancel in bench.send().cancels] == [(bench.ticket.id, GONE)]
    bench.tokens(0, [10], bench.ending(FinishReason.FINISH_REASON_LENGTH))
    assert bench.ticket.ending.reason == FinishReason.FINISH_REASON_LENGTH


def test_a_second_cancel_is_not_sent():
    bench = Bench()
    bench.send()
    bench.book.cancel(bench.ticket, GONE, bench.now)
    bench.send()
    bench.book.cancel(bench.ticket, CancelReason.CANCEL_REASON_TIMEOUT, bench.now)
    assert bench.send() is None


def test_a_lost_session_resubmits_with_the_tokens_so_far_and_a_higher_attempt():
    bench = Bench()
    bench.send()
    bench.accept()
    bench.tokens(0, [10, 11])
    bench.book.lost(bench.now)
    submit = bench.send().submits[0]
    assert (submit.id, submit.attempt, unpack_ids(submit.output_ids)) == (bench.ticket.id, 1, [10, 11])
    bench.tokens(2, [12], bench.ending())
    assert bench.ticket.output == [10, 11, 12]
    assert bench.seen.resumptions == 1


def test_a_resubmission_waits_until_the_scheduler_is_ready_but_a_first_submission_does_not():
    bench = Bench()
    bench.send()
    bench.book.lost(bench.now)
    fresh = bench.new_ticket()
    assert [submit.id for submit in bench.send(ready=False).submits] == [fresh.id]
    assert [submit.id for submit in bench.send(ready=True).submits] == [bench.ticket.id]


def test_messages_of_the_lost_session_change_nothing():
    bench = Bench()
    bench.send()
    bench.book.lost(bench.now)
    bench.tokens(0, [10])
    bench.end()
    assert bench.ticket.output == []
    assert bench.ticket.ending is None
    assert bench.seen.strays == ["delta", "ending"]


def test_an_ending_of_an_earlier_attempt_is_ignored():
    bench = Bench()
    bench.send()
    bench.book.lost(bench.now)
    bench.send()
    bench.end(attempt=0)
    assert bench.ticket.ending is None


def test_a_cancelled_ticket_ends_with_its_session():
    bench = Bench()
    bench.send()
    bench.book.cancel(bench.ticket, CancelReason.CANCEL_REASON_TIMEOUT, bench.now)
    bench.book.lost(bench.now)
    assert bench.ticket.ending.reason == FinishReason.FINISH_REASON_DEADLINE
    assert bench.send() is None


def test_a_ticket_that_waits_too_long_for_a_session_fails():
    bench = Bench()
    bench.send()
    bench.accept()
    bench.now = 100 * SECOND
    bench.book.lost(bench.now)
    bench.book.expire(bench.now + 29 * SECOND)
    assert bench.ticket.ending is None
    bench.book.expire(bench.now + 30 * SECOND)
    assert TokenloomError.from_proto(bench.ticket.ending.error).code is ErrorCode.SESSION_LOST
    assert bench.released == 1


def test_a_ticket_that_loses_its_scheduler_again_and_again_fails():
    bench = Bench()
    for _ in range(MAX_LOSSES + 1):
        assert bench.ticket.ending is None
        assert len(bench.send().submits) == 1
        bench.accept()
        bench.book.lost(bench.now)
    assert bench.ticket.ending.reason == FinishReason.FINISH_REASON_FAILED
    assert bench.send() is None


@pytest.mark.parametrize("reason", [CancelReason.CANCEL_REASON_SHUTDOWN, CancelReason.CANCEL_REASON_SESSION_LOST])
def test_a_scheduler_that_shuts_down_does_not_end_the_request(reason):
    bench = Bench()
    bench.send()
    bench.accept()
    bench.tokens(0, [10], bench.ending(FinishReason.FINISH_REASON_CANCELLED, cancel_reason=reason))
    assert bench.ticket.ending is None
    assert bench.send() is None, "not at once: the same scheduler would refuse it"
    bench.now += SECOND
    submit = bench.send().submits[0]
    assert (submit.attempt, unpack_ids(submit.output_ids)) == (1, [10])


def test_a_cancel_that_the_gateway_asked_for_is_never_resumed():
    bench = Bench()
    bench.send()
    bench.book.cancel(bench.ticket, CancelReason.CANCEL_REASON_SHUTDOWN, bench.now)
    bench.end(FinishReason.FINISH_REASON_CANCELLED, cancel_reason=CancelReason.CANCEL_REASON_SHUTDOWN)
    assert bench.ticket.ending is not None


def test_the_refusal_of_a_first_submission_is_its_ending():
    bench = Bench()
    bench.send()
    error = TokenloomError(ErrorCode.QUEUE_FULL, "full").to_proto()
    bench.end(FinishReason.FINISH_REASON_FAILED, error=error, was_accepted=False)
    assert bench.ticket.ending.error.message == "full"


def test_the_refusal_of_a_resubmission_is_tried_again_until_the_resume_timeout():
    bench = Bench()
    bench.send()
    bench.accept()
    bench.book.lost(bench.now)
    started, error = bench.now, TokenloomError(ErrorCode.NO_WORKER, "none yet").to_proto()
    for attempt in range(1, 4):
        assert bench.send().submits[0].attempt == attempt
        bench.end(FinishReason.FINISH_REASON_FAILED, error=error, was_accepted=False)
        assert bench.ticket.ending is None
        bench.now += SECOND
    bench.book.expire(started + 30 * SECOND)
    assert bench.ticket.ending is not None


def test_a_resubmission_refused_for_good_ends():
    bench = Bench()
    bench.send()
    bench.book.lost(bench.now)
    bench.send()
    error = TokenloomError(ErrorCode.CANNOT_FIT, "too long for this worker").to_proto()
    bench.end(FinishReason.FINISH_REASON_FAILED, error=error, was_accepted=False)
    assert bench.ticket.ending.error.message == "too long for this worker"


def test_gaps_between_tokens_are_observed_from_the_second_on():
    bench = Bench()
    bench.send()
    bench.tokens(0, [10])
    bench.now += 5
    bench.tokens(1, [11, 12])
    assert bench.seen.gaps == [(1, 0), (2, 5)]
