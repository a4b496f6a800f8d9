"""Stop matching: vLLM's rule, on bytes, one token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.automaton import StopAutomaton
from libs.text.stopping import StopMatch, StopMatcher
from libs.text.table import TextRule, TextTable

WORDS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=12)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def table_of(tokens: list[str]) -> TextTable:
    return TextTable("t", tuple(token.encode() for token in tokens), bytes(len(tokens)), TextRule.BYTE_LEVEL)


def vllm_rule(text: str, new_chars: int, stop: list[str]) -> tuple[str, int] | None:
    """Of the strings found in what the last token can have completed, the first of the list, cut where it is first found there."""
    for candidate in stop:
        place = text.find(candidate, max(0, len(text) - new_chars - len(candidate) + 1))
        if place >= 0:
            return candidate, place
    return None


@given(WORDS, STOPS)
def test_the_match_is_the_one_that_searching_the_text_after_each_token_finds(words, stop):
    matcher, text = StopMatcher(table_of(words), stop), ""
    for token_id, word in enumerate(words):
        text += word
        expected = vllm_rule(text, len(word), stop)
        match = matcher.push(token_id)
        assert match == (None if expected is None else StopMatch(expected[0], len(text[: expected[1]].encode())))


@given(st.text(alphabet="ab", max_size=40), STOPS)
def test_the_automaton_finds_every_occurrence_and_no_other(text, stop):
    automaton, state, data = StopAutomaton(stop), 0, text.encode()
    for end in range(1, len(data) + 1):
        state = automaton.step(state, data[end - 1])
        assert automaton.matches[state] == tuple(i for i, s in enumerate(stop) if data[:end].endswith(s.encode()))
        begun = [n for s in stop for n in range(1, len(s.encode()) + 1) if data[:end].endswith(s.encode()[:n])]
        assert automaton.depth[state] == max(begun, default=0)


def test_a_stop_string_may_begin_in_an_earlier_token_and_end_within_one():
    matcher = StopMatcher(table_of(["Hel", "lo wor", "ld!"]), ["o world"])
    assert [matcher.push(0), matcher.push(1)] == [None, None]
    assert matcher.push(2) == StopMatch("o world", 4)


def test_the_first_string_of_the_list_wins_over_one_that_ends_earlier():
    matcher = StopMatcher(table_of(["a.b!"]), ["!", "."])
    assert matcher.push(0) == StopMatch("!", 3)


def test_of_several_occurrences_in_one_token_the_first_cuts():
    assert StopMatcher(table_of(["x--x--"]), ["--"]).push(0) == StopMatch("--", 1)


def test_a_match_below_min_tokens_is_void_for_good():
    matcher = StopMatcher(table_of(["stop", "x"]), ["stop"])
    assert matcher.push(0, may_match=False) is None
    assert matcher.push(1) is None
    assert matcher.push(0) == StopMatch("stop", 5)


def test_a_match_may_begin_below_min_tokens():
    matcher = StopMatcher(table_of(["st", "op"]), ["stop"])
    assert matcher.push(0, may_match=False) is None
    assert matcher.push(1) == StopMatch("stop", 0)


def test_without_stop_strings_it_counts_bytes():
    matcher = StopMatcher(table_of(["€", "ab"]))
    assert [matcher.push(0), matcher.push(1), matcher.push(99)] == [None, None, None]
    assert matcher.bytes_so_far == 5


def test_special_tokens_have_no_part_in_matching():
    table = TextTable("t", (b"st", b"<e>", b"op"), bytes([0, 2, 0]), TextRule.BYTE_LEVEL)
    matcher = StopMatcher(table, ["stop", "<e>"])
    assert [matcher.push(0), matcher.push(1)] == [None, None]
    assert matcher.push(2) == StopMatch("stop", 0)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(table_of(["a"]), [""])
