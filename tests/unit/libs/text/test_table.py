"""The text table, on the wire and off it."""

from __future__ import annotations

import pytest

from libs.packing import pack_ids
from libs.text.table import TextRule, TextTable, TokenClass
from tests.unit.libs.text.tables import TABLES
from tokenloom.tokenizer.v1 import tokenizer_pb2


@pytest.mark.parametrize("table", TABLES, ids=["byte-level", "fallback-strip", "fallback"])
def test_a_table_survives_the_wire(table):
    assert TextTable.from_proto(tokenizer_pb2.GetTextTableResponse.FromString(table.to_proto().SerializeToString())) == table


def test_the_classes_are_those_of_the_contract():
    assert {kind.name for kind in TokenClass} == {"TEXT", "BYTE", "SPECIAL", "ADDED", "UNUSED"}
    assert len(TokenClass) == len(tokenizer_pb2.TokenClass.values())
    assert len(TextRule) + 1 == len(tokenizer_pb2.TextRule.values())


def test_bytes_and_classes_beyond_the_vocabulary_are_nothing():
    table = TABLES[0]
    assert table.token_bytes(table.vocab_size) == b""
    assert table.token_class(table.vocab_size) is TokenClass.UNUSED
    assert table.token_bytes(0) == b"a"
    assert table.token_class(0) is TokenClass.TEXT


@pytest.mark.parametrize(
    "broken",
    [
        {"offsets": b""},
        {"offsets": pack_ids([0, 2])},
        {"offsets": pack_ids([1, 3])},
        {"offsets": b"\0\0\0"},
        {"classes": b"\0\0"},
        {"rule": 0},
    ],
)
def test_a_table_whose_parts_do_not_fit_is_refused(broken):
    parts = {"offsets": pack_ids([0, 3]), "data": b"abc", "classes": b"\0", "rule": 1} | broken
    with pytest.raises(ValueError):
        TextTable.from_proto(tokenizer_pb2.GetTextTableResponse(**parts))
