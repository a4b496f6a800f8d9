"""Small awkward text tables for property tests, and what the tokenizers' decoders make of them, written down independently."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import strategies as st

from libs.text.table import TextRule, TextTable, TokenClass

# Byte-level: halves and thirds of characters, invalid bytes, a surrogate's encoding, an empty token.
_CHARACTER_PARTS = [b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"\xf0\x9f", b"\x98", b"\x80b"]
_BYTE_LEVEL = [b"a", b"b", b" ", b"ab", *_CHARACTER_PARTS, b"\xff", b"\xed\xa0\x80", b"", b"\n\na"]
_FALLBACK = [" a", " ", "b", "é", "", "a", "  ", "€"]


def byte_level_table() -> TextTable:
    """A byte-level table; its last three ids are special, unused and added."""
    tokens = (*_BYTE_LEVEL, b"<e>", b"", b"ab!")
    classes = bytes([TokenClass.TEXT] * len(_BYTE_LEVEL) + [TokenClass.SPECIAL, TokenClass.UNUSED, TokenClass.ADDED])
    return TextTable("byte-level", tokens, classes, TextRule.BYTE_LEVEL, verified=True)


def fallback_table(strip_first_space: bool) -> TextTable:
    """A byte-fallback table: text tokens, eight byte tokens that spell and misspell characters, then special, unused and added ones."""
    spelled = [0x20, 0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF]
    tokens = (*(text.encode() for text in _FALLBACK), *(bytes([byte]) for byte in spelled), b"<e>", b"", b" !")
    kinds = [TokenClass.TEXT] * len(_FALLBACK) + [TokenClass.BYTE] * len(spelled)
    classes = bytes([*kinds, TokenClass.SPECIAL, TokenClass.UNUSED, TokenClass.ADDED])
    return TextTable("fallback", tokens, classes, TextRule.BYTE_FALLBACK, strip_first_space, verified=True)


TABLES = [byte_level_table(), fallback_table(True), fallback_table(False)]


@st.composite
def table_and_ids(draw: st.DrawFn) -> tuple[TextTable, list[int]]:
    """A table and ids for it, now and then one beyond its vocabulary."""
    table = draw(st.sampled_from(TABLES))
    return table, draw(st.lists(st.integers(0, table.vocab_size + 1), max_size=24))


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """`ids` cut at the given places (taken modulo the length)."""
    places = sorted({cut % (len(ids) + 1) for cut in cuts})
    return [list(ids[start:end]) for start, end in zip([0, *places], [*places, len(ids)], strict=True)]


def reference_decode(table: TextTable, ids: Sequence[int]) -> str:
    """The whole text as the `tokenizers` package would decode it, special tokens skipped."""
    kept = [i for i in ids if i < table.vocab_size and table.token_class(i) not in (TokenClass.SPECIAL, TokenClass.UNUSED)]
    if table.rule is TextRule.BYTE_LEVEL:
        return b"".join(table.tokens[i] for i in kept).decode("utf-8", "replace")
    # Byte tokens as two hex digits, others as one letter and an index: a run is what a regular expression finds.
    coded = "".join(f"{table.tokens[i][0]:02x}" if table.token_class(i) is TokenClass.BYTE else f"T{i};" for i in kept)
    text = "".join(_piece(table, piece) for piece in re.findall(r"(?:[0-9a-f]{2})+|T\d+;", coded))
    return text.removeprefix(" ") if table.strip_first_space else text


def _piece(table: TextTable, piece: str) -> str:
    if piece.startswith("T"):
        return table.tokens[int(piece[1:-1])].decode()
    run = bytes.fromhex(piece)
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
