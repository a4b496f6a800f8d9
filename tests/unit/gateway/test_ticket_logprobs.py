"""Log-probabilities reach a ticket's reader once each, with their tokens, over lost sessions and repeated frames."""

from __future__ import annotations

import asyncio

import pytest

from libs.packing import pack_ids
from libs.text.decoding import IncrementalText
from services.gateway.streamer import Choice
from services.gateway.tickets import BookObserver, SessionBroken, Ticket, TicketBook
from tests.support.gateway_fakes import byte_table
from tests.support.logprobs import told_all
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

PROMPT = [11, 12, 13, 14]


class Strays(BookObserver):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def stray(self, kind):
        self.kinds.append(kind)


class Bench:
    """A book with one ticket that asks for log-probabilities of its output, of its prompt, or of both."""

    def __init__(self, logprobs: int | None = 1, prompt_logprobs: int | None = None) -> None:
        self.seen = Strays()
        self.book = TicketBook(resume_timeout_ns=10**10, observer=self.seen)
        sampling = common_pb2.SamplingParams(max_tokens=8, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        self.ticket = Ticket(scheduler_pb2.Submit(id=self.book.next_id(), prompt_ids=pack_ids(PROMPT), sampling=sampling), asyncio.Event())
        self.choice = Choice(0, self.ticket, pack_ids(PROMPT), IncrementalText(byte_table(), ()))
        self.book.add(self.ticket, 1)
        self.submitted()

    def submitted(self) -> scheduler_pb2.Submit:
        frame = self.book.next_frame(1, ready=True)
        assert frame is not None
        return scheduler_pb2.Submit.FromString(frame.submits[0].SerializeToString())

    def resumed(self) -> scheduler_pb2.Submit:
        self.book.lost(2)
        return self.submitted()

    def receive(self, first: int, tokens: list[int], *, told: int | None = 1, positions: tuple[int, int] | None = None) -> None:
        frame = scheduler_pb2.SchedulerFrame()
        if positions is not None:
            alternatives = self.ticket.prompt_positions.alternatives if self.ticket.prompt_positions is not None else 0
            made = told_all(positions[0], PROMPT[slice(*positions)], alternatives)
            frame.prompt_positions.add(id=self.ticket.id, first_position=positions[0], logprobs=made.to_proto())
        if tokens:
            frame.ids.append(self.ticket.id)
            frame.first_indexes.append(first)
            frame.counts.append(len(tokens))
            frame.token_ids = pack_ids(tokens)
            if told is not None:
                frame.logprobs.append(told_all(len(PROMPT) + first, tokens, told).to_proto())
        self.book.receive(scheduler_pb2.SchedulerFrame.FromString(frame.SerializeToString()), 3)

    def change(self):
        change = self.choice.advance()
        assert change is not None
        return change


def test_each_token_comes_with_its_own():
    bench = Bench()
    bench.receive(0, [65])
    bench.receive(1, [66, 67])
    assert bench.change().logprobs == told_all(4, [65, 66, 67], 1).unpack()
    bench.receive(3, [68])
    change = bench.change()
    assert (change.token_ids, change.logprobs) == ([68], told_all(7, [68], 1).unpack())


def test_who_asked_for_none_gets_none():
    bench = Bench(None)
    bench.receive(0, [65], told=None)
    change = bench.change()
    assert change.logprobs is None
    assert change.prompt_logprobs is None


@pytest.mark.parametrize("read_before", [False, True])
def test_what_comes_again_after_a_lost_session_is_dropped(read_before):
    bench = Bench()
    bench.receive(0, [65, 66])
    seen = bench.change().logprobs if read_before else []
    assert bench.resumed().output_ids == pack_ids([65, 66])
    bench.receive(0, [65, 66, 67])
    assert [*seen, *bench.change().logprobs] == told_all(4, [65, 66, 67], 1).unpack()


def test_tokens_without_them_break_the_session():
    with pytest.raises(SessionBroken, match="without the log-probabilities"):
        Bench().receive(0, [65], told=None)


def test_another_number_of_alternatives_breaks_the_session():
    with pytest.raises(SessionBroken, match="2 alternatives behind such with 1"):
        Bench().receive(0, [65], told=2)


def test_fewer_positions_than_tokens_break_the_session():
    bench = Bench()
    frame = scheduler_pb2.SchedulerFrame(ids=[1], first_indexes=[0], counts=[2], token_ids=pack_ids([65, 66]))
    frame.logprobs.append(told_all(4, [65], 1).to_proto())
    with pytest.raises(SessionBroken, match="2 tokens with log-probabilities of 1"):
        bench.book.receive(frame, 3)
    frame.logprobs.append(common_pb2.Logprobs())
    with pytest.raises(SessionBroken, match="news of 1 requests"):
        bench.book.receive(frame, 3)
    frame.logprobs.pop()
    frame.logprobs[0].ranks.append(7)
    with pytest.raises(SessionBroken, match="2 positions with 1 alternatives"):
        bench.book.receive(frame, 3)


def test_the_prompt_comes_whole_with_the_first_tokens():
    bench = Bench(None, 2)
    bench.receive(0, [], positions=(0, 3))
    assert bench.choice.advance() is None
    bench.receive(0, [65], told=None, positions=(3, 4))
    told = bench.change().prompt_logprobs
    assert [entry.token_id for entry in told] == PROMPT
    assert told[1:] == told_all(0, PROMPT, 2).unpack()[1:]
    bench.receive(1, [66], told=None)
    assert bench.change().prompt_logprobs is None


def test_positions_that_come_again_are_dropped_and_a_gap_breaks_the_session():
    bench = Bench(None, 0)
    bench.receive(0, [], positions=(0, 2))
    assert bench.resumed().sampling.HasField("prompt_logprobs")
    bench.receive(0, [], positions=(0, 3))
    assert bench.ticket.prompt_positions is not None
    assert len(bench.ticket.prompt_positions) == 3
    bench = Bench(None, 0)
    with pytest.raises(SessionBroken, match="positions 0 to 1 are missing"):
        bench.receive(0, [], positions=(2, 4))


def test_a_token_before_the_prompts_positions_breaks_the_session():
    bench = Bench(None, 0)
    bench.receive(0, [], positions=(0, 3))
    with pytest.raises(SessionBroken, match="before the prompt's"):
        bench.receive(0, [65], told=None)


def test_a_prompt_that_is_told_is_not_asked_for_again():
    bench = Bench(0, 0)
    bench.receive(0, [65], told=0, positions=(0, 4))
    again = bench.resumed()
    assert not again.sampling.HasField("prompt_logprobs")
    assert again.sampling.HasField("logprobs")
    assert len(bench.change().prompt_logprobs) == 4


def test_later_choices_show_what_the_first_was_told():
    bench = Bench(None, 0)
    bench.receive(0, [65], told=None, positions=(0, 4))
    other = Ticket(scheduler_pb2.Submit(id=9, prompt_ids=pack_ids(PROMPT)), asyncio.Event(), output=[70])
    second = Choice(1, other, pack_ids(PROMPT), IncrementalText(byte_table(), ()), bench.choice)
    change = second.advance()
    assert change is not None
    assert [entry.token_id for entry in change.prompt_logprobs or ()] == PROMPT


def test_positions_for_nobody_are_counted():
    bench = Bench()
    frame = scheduler_pb2.SchedulerFrame()
    frame.prompt_positions.add(id=77, logprobs=told_all(0, PROMPT).to_proto())
    frame.prompt_positions.add(id=bench.ticket.id, logprobs=told_all(0, PROMPT).to_proto())
    bench.book.receive(frame, 3)
    assert bench.seen.kinds == ["positions", "positions"]
