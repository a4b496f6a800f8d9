"""A choice gives the same text however its tokens are cut into deltas."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from libs.packing import pack_ids
from libs.text.decoding import IncrementalText, decode_text
from services.gateway.streamer import Choice, TokenCounts, count_tokens
from services.gateway.tickets import FinishReason, Ticket
from tests.support.gateway_fakes import EOS, byte_table
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

TABLE = byte_table()


def choice_of(stop: tuple[str, ...] = ()) -> Choice:
    ticket = Ticket(scheduler_pb2.Submit(id=1), asyncio.Event())
    return Choice(0, ticket, b"", IncrementalText(TABLE, stop))


@given(st.lists(st.integers(0, EOS), max_size=40), st.lists(st.integers(1, 7), min_size=1, max_size=10))
def test_the_pieces_are_the_whole(tokens, sizes):
    choice, text, seen, position = choice_of(), "", [], 0
    for turn in range(len(tokens) + 1):
        size = sizes[turn % len(sizes)]
        choice.ticket.output += tokens[position : position + size]
        position += size
        if position >= len(tokens):
            choice.ticket.ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_LENGTH)
        change = choice.advance()
        if change is not None:
            text += change.text
            seen += change.token_ids
        if choice.ended:
            break
    assert (text, seen) == (decode_text(TABLE, tokens), tokens)


@given(st.text(alphabet="abST", max_size=20), st.integers(1, 5))
def test_nothing_that_the_ending_cuts_was_shown_before_it(prefix, size):
    """The stop string may lie anywhere in the deltas; what is kept is exactly what comes before it."""
    whole = prefix + "STOP!"
    kept = whole.index("STOP")
    choice, text = choice_of(("STOP",)), ""
    tokens = list(whole.encode())[: kept + 4]
    for start in range(0, len(tokens), size):
        choice.ticket.output += tokens[start : start + size]
        if start + size >= len(tokens):
            choice.ticket.ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_STOP, keep_bytes=kept)
        change = choice.advance()
        text += change.text if change else ""
        assert whole[:kept].startswith(text)
    assert text == whole[:kept]


def test_an_ended_choice_has_nothing_more_to_say():
    choice = choice_of()
    choice.ticket.ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_STOP)
    assert choice.advance() is not None
    assert choice.advance() is None


def test_nothing_new_is_no_change():
    assert choice_of().advance() is None


def choices_of(prompts: list[tuple[int, list[tuple[int, int]]]], *, ended: bool) -> list[Choice]:
    """Prompts as (length, choices), choices as (tokens of output, cached tokens)."""
    found = []
    for length, outputs in prompts:
        for number, (count, cached) in enumerate(outputs):
            submit = scheduler_pb2.Submit(id=1 + len(found), sampling=common_pb2.SamplingParams(choice_index=number))
            ticket = Ticket(submit, asyncio.Event(), output=[1] * count, taken=count)
            if ended:
                ticket.ending = scheduler_pb2.Ending(prompt_tokens=length, completion_tokens=count, cached_tokens=cached)
            found.append(Choice(len(found), ticket, pack_ids([1] * length), IncrementalText(TABLE, ())))
    return found


OUTPUTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=4)
PROMPTS = st.lists(st.tuples(st.integers(1, 50), OUTPUTS), min_size=1, max_size=4)


@given(PROMPTS)
def test_each_prompt_counts_once_with_its_first_choice_and_every_output_counts(prompts):
    count = count_tokens(choices_of(prompts, ended=True))
    lengths, outputs = sum(length for length, _ in prompts), sum(count for _, outputs in prompts for count, _ in outputs)
    assert count == TokenCounts(lengths, outputs, sum(outputs[0][1] for _, outputs in prompts))


@given(PROMPTS)
def test_before_the_endings_what_was_delivered_counts_and_the_prompt_already_does(prompts):
    count = count_tokens(choices_of(prompts, ended=False))
    assert (count.prompt, count.cached) == (sum(length for length, _ in prompts), None), "what was cached is told at the end"
    assert count.completion == sum(tokens for _, outputs in prompts for tokens, _ in outputs)
