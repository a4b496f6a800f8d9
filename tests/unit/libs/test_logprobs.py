"""Packed log-probabilities: pieces and joins keep every position whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.logprobs import PackedLogprobs, TokenLogprobs
from tests.support.logprobs import packed, told_all
from tokenloom.common.v1 import common_pb2


@given(st.lists(st.integers(0, 2**32 - 1), max_size=12), st.integers(0, 3), st.integers(0, 14), st.integers(0, 14))
def test_pieces_join_to_the_whole(tokens, alternatives, first, second):
    whole = told_all(1, [token % 256 for token in tokens], alternatives)
    low, high = sorted((first, second))
    joined = whole.piece(0, low)
    joined.extend(whole.piece(low, high))
    joined.extend(whole.piece(high))
    assert joined == whole == PackedLogprobs.from_proto(common_pb2.Logprobs.FromString(whole.to_proto().SerializeToString()))
    assert [entry.token_id for entry in whole.unpack()] == [token % 256 for token in tokens]


def test_a_position_is_read_with_its_alternatives():
    entry = packed([([7, 9, 7], [-1.5, -0.25, -1.5], 2)], 2).unpack()[0]
    assert entry == TokenLogprobs(7, -1.5, 2, [9, 7], [-0.25, -1.5])


def test_an_undefined_position_is_not_a_number():
    assert math.isnan(told_all(0, [5], 1).unpack()[0].logprob)


def test_a_piece_is_a_copy():
    whole = told_all(1, [1, 2])
    whole.piece(0).extend(told_all(3, [3]))
    assert len(whole) == 2


def test_arrays_of_other_lengths_are_refused():
    message = told_all(1, [1, 2], 1).to_proto()
    message.ranks.append(1)
    with pytest.raises(ValueError, match="3 positions with 1 alternatives"):
        PackedLogprobs.from_proto(message)


def test_positions_with_other_alternatives_do_not_join():
    with pytest.raises(ValueError, match="2 alternatives behind such with 1"):
        told_all(1, [1], 1).extend(told_all(2, [2], 2))
