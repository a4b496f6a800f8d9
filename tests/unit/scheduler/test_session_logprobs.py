"""Log-probabilities in outboxes: merged, and cut into frames of bounded size that overtake nothing."""

from __future__ import annotations

import random

import pytest

from libs.logprobs import PackedLogprobs
from libs.packing import unpack_ids
from services.scheduler import sessions
from services.scheduler.sessions import Outbox
from tests.support.logprobs import told_all
from tokenloom.scheduler.v1 import scheduler_pb2

WINDOW = scheduler_pb2.Window()


def frames_of(box: Outbox) -> list[scheduler_pb2.SchedulerFrame]:
    frames = []
    while not box.is_empty:
        frames.append(scheduler_pb2.SchedulerFrame.FromString(box.take(9, WINDOW).SerializeToString()))
        assert len(frames) < 1000
    return frames


def test_they_ride_with_their_tokens_and_are_empty_for_who_asked_for_none():
    box = Outbox()
    box.add_tokens(1, 0, [10], told_all(5, [10], 1))
    box.add_tokens(2, 0, [20])
    box.add_tokens(1, 1, [11, 12], told_all(6, [11, 12], 1))
    (frame,) = frames_of(box)
    assert [PackedLogprobs.from_proto(message) for message in frame.logprobs] == [told_all(5, [10, 11, 12], 1), PackedLogprobs(0)]


def test_a_frame_for_nobody_who_asked_has_none():
    box = Outbox()
    box.add_tokens(2, 0, [20])
    (frame,) = frames_of(box)
    assert not frame.logprobs


def test_an_older_attempts_output_is_forgotten():
    box = Outbox()
    box.add_tokens(1, 0, [10], told_all(5, [10]))
    box.add_positions(1, 0, told_all(0, [4, 5]))
    box.forget(1)
    frame = box.take(9, WINDOW)
    assert (len(frame.ids), len(frame.prompt_positions)) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_frames_are_bounded_and_everything_arrives_once_and_in_order(monkeypatch: pytest.MonkeyPatch, seed: int):
    """Positions before tokens, tokens before the ending, of each request; those that ask for nothing never wait."""
    chosen, bound = random.Random(seed), 200
    monkeypatch.setattr(sessions, "MAX_LOGPROBS_BYTES", bound)
    box, asks = Outbox(), {number: chosen.choice([None, 0, 3]) for number in range(1, 6)}
    prompts = {number: [number] * chosen.randrange(1, 30) for number in asks}
    outputs = {number: [chosen.randrange(40) for _ in range(chosen.randrange(1, 30))] for number in asks}
    for number, asked in asks.items():
        if asked is not None:
            box.add_positions(number, 0, told_all(0, prompts[number], asked))
        logprobs = None if asked is None else told_all(len(prompts[number]), outputs[number], asked)
        box.add_tokens(number, 0, outputs[number], logprobs)
        box.endings.append(scheduler_pb2.Ending(id=number))
    frames = frames_of(box)
    positions, tokens = dict.fromkeys(asks, 0), {number: list[int]() for number in asks}
    ended: list[int] = []
    for frame in frames:
        size = sum(len(message.token_ids) * 2 for message in frame.logprobs)
        size += sum(len(part.logprobs.token_ids) * 2 for part in frame.prompt_positions)
        assert size <= bound
        for part in frame.prompt_positions:
            assert (part.first_position, tokens[part.id], part.id in ended) == (positions[part.id], [], False)
            positions[part.id] += len(part.logprobs.ranks)
        fresh = unpack_ids(frame.token_ids)
        for at, (number, first, count) in enumerate(zip(frame.ids, frame.first_indexes, frame.counts, strict=True)):
            assert first == len(tokens[number])
            assert asks[number] is None or positions[number] == len(prompts[number])
            drawn = [fresh.pop(0) for _ in range(count)]
            tokens[number] += drawn
            if asks[number] is not None:
                told = PackedLogprobs.from_proto(frame.logprobs[at])
                assert told == told_all(len(prompts[number]) + first, drawn, asks[number])
        ended += [ending.id for ending in frame.endings]
        assert all(tokens[number] == outputs[number] for number in ended)
    assert sorted(ended) == sorted(asks)
    assert set(frames[0].ids) >= {number for number, asked in asks.items() if asked is None}
