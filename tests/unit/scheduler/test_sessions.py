"""Outboxes: what the writer has not sent yet is merged, and no ending is ever lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.packing import unpack_ids
from services.scheduler.sessions import GatewaySession, Outbox
from tokenloom.scheduler.v1 import scheduler_pb2

WINDOW = scheduler_pb2.Window(max_outstanding=3, ready=True)


def sent(box: Outbox) -> scheduler_pb2.SchedulerFrame:
    return box.take(9, WINDOW)


def test_a_new_outbox_has_a_window_to_tell():
    box = Outbox()
    assert not box.is_empty
    frame = sent(box)
    assert (frame.session, frame.window) == (9, WINDOW)
    assert box.is_empty


def test_tokens_of_one_request_become_one_entry():
    box = Outbox()
    box.add_tokens(1, 4, [10])
    box.add_tokens(2, 0, [20])
    box.add_tokens(1, 5, [11, 12])
    frame = sent(box)
    assert (list(frame.ids), list(frame.first_indexes), list(frame.counts)) == ([1, 2], [4, 0], [3, 1])
    assert unpack_ids(frame.token_ids) == [10, 11, 12, 20]


def test_a_taken_frame_is_not_sent_again():
    box = Outbox()
    box.add_tokens(1, 0, [10])
    box.accepted.append(1)
    box.endings.append(scheduler_pb2.Ending(id=1))
    sent(box)
    frame = sent(box)
    assert [*frame.ids, *frame.accepted, *frame.endings] == []
    assert not frame.HasField("welcome")


def test_a_frame_that_was_taken_does_not_change_with_the_outbox():
    box = Outbox()
    box.endings.append(scheduler_pb2.Ending(id=1))
    frame = sent(box)
    box.endings.append(scheduler_pb2.Ending(id=2))
    assert [ending.id for ending in frame.endings] == [1]


def test_each_thing_to_say_makes_it_worth_a_frame():
    for fill in (
        lambda box: box.add_tokens(1, 0, [1]),
        lambda box: box.accepted.append(1),
        lambda box: box.endings.append(scheduler_pb2.Ending(id=1)),
        lambda box: setattr(box, "welcome", scheduler_pb2.Welcome()),
        lambda box: setattr(box, "window_changed", True),
    ):
        box = Outbox(window_changed=False)
        assert box.is_empty
        fill(box)
        assert not box.is_empty


def test_a_nudge_wakes_the_writer():
    session = GatewaySession(1, 7, "gateway-0")
    session.nudge()
    assert session.wake.is_set()


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.integers(1, 4), st.integers(1, 3)),
        st.tuples(st.just("ending"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    )
)


@given(_EVENTS)
def test_whenever_the_writer_comes_every_token_arrives_once_in_order_and_before_its_ending(events: list[tuple[str, int, int]]):
    box, produced, got, ended = Outbox(), dict[int, list[int]](), dict[int, list[int]](), list[int]()
    over, token = set[int](), 0

    def take() -> None:
        frame = sent(box)
        tokens, at = unpack_ids(frame.token_ids), 0
        for number, first, count in zip(frame.ids, frame.first_indexes, frame.counts, strict=True):
            assert number not in ended
            assert first == len(got.setdefault(number, []))
            got[number].extend(tokens[at : at + count])
            at += count
        assert at == len(tokens)
        ended.extend(ending.id for ending in frame.endings)

    for kind, number, count in events:
        if kind == "take":
            take()
        elif number in over:
            continue
        elif kind == "ending":
            over.add(number)
            box.endings.append(scheduler_pb2.Ending(id=number))
        else:
            fresh = list(range(token, token + count))
            token += count
            box.add_tokens(number, len(produced.setdefault(number, [])), fresh)
            produced[number].extend(fresh)
    take()
    assert got == produced
    assert sorted(ended) == sorted(over)
