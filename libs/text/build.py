"""A text table from a tokenizer, checked against the tokenizer's own decode. Needs the `tokenizers` package.

Two families are known. Byte-level BPE (GPT-2 and its descendants) writes each byte of a token as one printable character; the
alphabet is inverted here. SentencePiece-style vocabularies write a space as U+2581 and have tokens <0x00> .. <0xFF> for what
nothing else spells; their decoder may drop the text's first space. Any other decoder is refused.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from libs.errors import ErrorCode, TokenloomError
from libs.text.decoding import decode_text
from libs.text.table import TextRule, TextTable, TokenClass

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_CHECKED_SEQUENCES = 2000
_LONGEST_SEQUENCE = 24


@dataclass(frozen=True, slots=True)
class _Spelling:
    """What a tokenizer's decoder does, as far as one token at a time can say it."""

    rule: TextRule
    strip_first_space: bool
    spell: Callable[[str], bytes]


def build_text_table(tokenizer: Tokenizer, fingerprint: str) -> TextTable:
    """The table of `tokenizer`; `verified` says whether it decodes random ids exactly as the tokenizer does.

    Raises TokenloomError(UNSUPPORTED) when the tokenizer's decoder belongs to neither family.
    """
    spelling = _spelling_of(tokenizer)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    size = max(vocabulary.values(), default=-1) + 1
    tokens, classes = [b""] * size, bytearray([TokenClass.UNUSED]) * size
    for token, token_id in vocabulary.items():
        byte = _BYTE_TOKEN.match(token) if spelling.rule is TextRule.BYTE_FALLBACK else None
        tokens[token_id] = bytes([int(byte[1], 16)]) if byte else spelling.spell(token)
        if token_id in added and added[token_id].special:
            classes[token_id] = TokenClass.SPECIAL
        elif byte:
            classes[token_id] = TokenClass.BYTE
        else:
            classes[token_id] = TokenClass.ADDED if token_id in added else TokenClass.TEXT
    table = TextTable(fingerprint, tuple(tokens), bytes(classes), spelling.rule, spelling.strip_first_space)
    return replace(table, verified=agrees(table, tokenizer))


def agrees(table: TextTable, tokenizer: Tokenizer) -> bool:
    """Whether both spell a few thousand random id sequences alike; the seed is fixed, so that every replica checks the same ones."""
    return all(
        decode_text(table, ids) == tokenizer.decode(ids, skip_special_tokens=True) for ids in _random_sequences(table, random.Random(30))
    )


def _random_sequences(table: TextTable, draw: random.Random) -> list[list[int]]:
    """Mostly any id; but byte, added and special tokens, where decoders differ, are rare among all ids and get their own share."""
    rare = [token_id for token_id, kind in enumerate(table.classes) if kind != TokenClass.TEXT]
    pools: list[Sequence[int]] = [range(table.vocab_size), range(table.vocab_size), rare or range(table.vocab_size)]
    if not table.vocab_size:
        return []
    return [[draw.choice(draw.choice(pools)) for _ in range(draw.randint(1, _LONGEST_SEQUENCE))] for _ in range(_CHECKED_SEQUENCES)]


def _spelling_of(tokenizer: Tokenizer) -> _Spelling:
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Spelling(TextRule.BYTE_LEVEL, False, byte_level_bytes)
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]

        def spell(token: str) -> bytes:
            for pattern, content in replacements:
                token = token.replace(pattern, content)
            return token.encode()

        return _Spelling(TextRule.BYTE_FALLBACK, _strips_first_space(steps), spell)
    name = " + ".join(kinds) or "none"
    raise TokenloomError(
        ErrorCode.UNSUPPORTED,
        f"the tokenizer's decoder ({name}) is not supported; supported are byte-level BPE and SentencePiece-style byte fallback",
    )


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _strips_first_space(steps: Sequence[dict[str, Any]]) -> bool:
    """A Strip after Fuse sees the whole text as one piece, so that it strips the text's first space and no other."""
    kinds = [step["type"] for step in steps]
    if "Strip" not in kinds:
        return False
    strip = steps[kinds.index("Strip")]
    return "Fuse" in kinds[: kinds.index("Strip")] and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet (an added token) stands for its own UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
