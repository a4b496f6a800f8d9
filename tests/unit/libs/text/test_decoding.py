"""Incremental decoding equals the full decode, shows no half character and nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.decoding import IncrementalText, OutputBytes, decode_text
from libs.text.stopping import StopMatcher
from libs.text.table import TextRule, TextTable, TokenClass
from tests.unit.libs.text.tables import TABLES, byte_level_table, chunks, fallback_table, reference_decode, table_and_ids

STOPS = st.lists(st.text(alphabet="ab é€\n", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def ascii_table(*tokens: str) -> TextTable:
    return TextTable("t", tuple(token.encode() for token in tokens), bytes(len(tokens)), TextRule.BYTE_LEVEL)


@given(table_and_ids(), CUTS)
def test_pieces_joined_are_the_full_decode_however_they_are_cut(drawn, cuts):
    table, ids = drawn
    text = IncrementalText(table)
    pieces = [text.push(chunk) for chunk in chunks(ids, cuts)]
    assert "".join(pieces) + text.finish() == reference_decode(table, ids)


@given(table_and_ids(), CUTS, STOPS)
def test_void_matches_leave_the_full_decode_unchanged(drawn, cuts, stop):
    table, ids = drawn
    text = IncrementalText(table, stop)
    pieces = [text.push(chunk) for chunk in chunks(ids, cuts)]
    assert "".join(pieces) + text.finish() == reference_decode(table, ids)


@given(table_and_ids(), CUTS)
def test_tokens_of_the_last_frame_may_come_with_the_ending(drawn, cuts):
    table, ids = drawn
    *before, last = chunks(ids, cuts)
    text = IncrementalText(table)
    pieces = [text.push(chunk) for chunk in before]
    assert "".join(pieces) + text.finish(None, last) == reference_decode(table, ids)


@given(table_and_ids(), STOPS)
def test_what_was_shown_is_never_more_than_what_a_match_keeps(drawn, stop):
    table, ids = drawn
    matcher, text, shown = StopMatcher(table, stop), IncrementalText(table, stop), ""
    for token_id in ids:
        match = matcher.push(token_id)
        shown += text.push([token_id])
        if match is not None:
            kept = OutputBytes(table).push(ids)[: match.keep_bytes]
            assert len(shown.encode()) <= len(kept) or "\ufffd" in shown
            whole = shown + text.finish(match.keep_bytes)
            assert whole.startswith(shown)
            if table.rule is TextRule.BYTE_LEVEL:
                assert whole == kept.decode("utf-8", "replace")
            return


@given(table_and_ids(), st.integers(0, 60))
def test_an_ending_keeps_exactly_the_bytes_it_names(drawn, keep):
    table, ids = drawn
    if table.rule is not TextRule.BYTE_LEVEL:
        table = byte_level_table()
        ids = [token_id % table.vocab_size for token_id in ids]
    assert IncrementalText(table).finish(keep, ids) == OutputBytes(table).push(ids)[:keep].decode("utf-8", "replace")


@given(table_and_ids())
def test_bytes_are_counted_alike_by_all_three_readers(drawn):
    table, ids = drawn
    output, matcher, text = OutputBytes(table), StopMatcher(table), IncrementalText(table)
    data = output.push(ids)
    for token_id in ids:
        matcher.push(token_id)
    text.push(ids)
    assert output.count == len(data) == matcher.bytes_so_far == text.bytes_so_far


def test_a_character_appears_only_with_its_last_byte():
    text = IncrementalText(byte_level_table())
    assert [text.push([4]), text.push([5]), text.push([6])] == ["", "", "€"]


def test_an_unfinished_character_becomes_one_replacement_at_the_end():
    text = IncrementalText(byte_level_table())
    assert text.push([0, 4, 5]) == "a"
    assert text.finish() == "\ufffd"


def test_a_valid_run_of_byte_tokens_appears_when_it_ends():
    text = IncrementalText(fallback_table(False))
    assert [text.push([12]), text.push([13, 14]), text.push([2])] == ["", "", "€b"]


def test_every_byte_of_an_invalid_run_is_a_replacement():
    table = fallback_table(False)
    assert decode_text(table, [9, 12, 13, 2]) == "\ufffd\ufffd\ufffdb"


def test_only_the_first_space_of_the_text_is_stripped():
    assert decode_text(fallback_table(True), [0, 0]) == "a a"
    assert decode_text(fallback_table(True), [6, 2]) == " b"
    assert decode_text(fallback_table(False), [0, 0]) == " a a"


def test_special_tokens_are_spelled_only_where_they_are_not_skipped():
    table = byte_level_table()
    special = list(table.classes).index(TokenClass.SPECIAL)
    assert decode_text(table, [0, special, 1]) == "ab"
    assert decode_text(table, [0, special, 1], skip_special_tokens=False) == "a<e>b"


def test_ids_beyond_the_vocabulary_spell_nothing():
    assert all(decode_text(table, [table.vocab_size, table.vocab_size + 7]) == "" for table in TABLES)


def test_the_beginning_of_a_stop_string_is_held_until_it_is_refuted():
    text = IncrementalText(ascii_table("x", "S", "T", "OP"), ["STOP"])
    assert [text.push([0]), text.push([1]), text.push([2]), text.push([0])] == ["x", "", "", "STx"]


def test_a_complete_stop_string_is_held_until_the_next_push():
    text = IncrementalText(ascii_table("a", "x.y", "b"), ["."])
    assert [text.push([0]), text.push([1]), text.push([2])] == ["a", "x", ".yb"]


def test_a_stop_string_and_what_follows_it_never_appear_when_the_ending_keeps_what_stands_before():
    text = IncrementalText(ascii_table("a", "x.y"), ["."])
    assert text.push([0, 1]) == "ax"
    assert text.finish(keep_bytes=2) == ""


def test_a_stop_tokens_text_does_not_appear_when_it_comes_with_the_ending():
    text = IncrementalText(ascii_table("a", "END"))
    assert text.push([0]) == "a"
    assert text.finish(1, [1]) == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        IncrementalText(byte_level_table(), ["a", ""])


def test_a_long_stop_string_that_almost_matches_is_released_whole():
    text = IncrementalText(ascii_table("a", "b"), ["a" * 50 + "c"])
    pieces = [text.push([0]) for _ in range(80)]
    assert "".join(pieces) == "a" * 30
    assert text.push([1]) == "a" * 50 + "b"
