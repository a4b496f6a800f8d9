"""The bytes and class of every token id, versioned by the tokenizer's fingerprint (PROTOCOL.md rule 30).

id        |   0   |   1   |    2    | ...
data      | "Hel" | "lo"  | "<eos>" | ...      one bytes object; id i is data[offsets[i]:offsets[i + 1]]
classes   | text  | text  | special | ...      one byte per id
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.packing import pack_ids, unpack_ids
from tokenloom.tokenizer.v1 import tokenizer_pb2


class TokenClass(enum.IntEnum):
    """How a token's bytes enter the text; the values are those of tokenizer.v1.TokenClass."""

    TEXT = tokenizer_pb2.TOKEN_CLASS_UNSPECIFIED
    BYTE = tokenizer_pb2.TOKEN_CLASS_BYTE
    SPECIAL = tokenizer_pb2.TOKEN_CLASS_SPECIAL
    ADDED = tokenizer_pb2.TOKEN_CLASS_ADDED
    UNUSED = tokenizer_pb2.TOKEN_CLASS_UNUSED


class TextRule(enum.IntEnum):
    """How the bytes of consecutive tokens become text; the values are those of tokenizer.v1.TextRule."""

    BYTE_LEVEL = tokenizer_pb2.TEXT_RULE_BYTE_LEVEL
    BYTE_FALLBACK = tokenizer_pb2.TEXT_RULE_BYTE_FALLBACK


@dataclass(frozen=True, slots=True)
class TextTable:
    """What every id spells. Immutable; one per process and tokenizer.

    `verified` is True when the table agreed with the tokenizer's own decode at start; otherwise stop strings must be refused.
    An id at or beyond `vocab_size` spells nothing: a model's logits may be wider than its vocabulary.
    """

    fingerprint: str
    tokens: tuple[bytes, ...] = field(repr=False)
    classes: bytes = field(repr=False)
    rule: TextRule
    strip_first_space: bool = False
    verified: bool = False
    # Per id, what it spells in text without special tokens: the hot path's single lookup.
    spelling: tuple[bytes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.classes) != len(self.tokens):
            raise ValueError(f"a text table of {len(self.tokens)} tokens has {len(self.classes)} classes")
        silent = (TokenClass.SPECIAL, TokenClass.UNUSED)
        spelling = tuple(b"" if kind in silent else token for token, kind in zip(self.tokens, self.classes, strict=True))
        object.__setattr__(self, "spelling", spelling)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id (special tokens included); empty for an unused id and beyond the vocabulary."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else b""

    def token_class(self, token_id: int) -> TokenClass:
        """The class of an id; UNUSED beyond the vocabulary."""
        return TokenClass(self.classes[token_id]) if 0 <= token_id < len(self.classes) else TokenClass.UNUSED

    def to_proto(self) -> tokenizer_pb2.GetTextTableResponse:
        """The table as it travels."""
        return tokenizer_pb2.GetTextTableResponse(
            tokenizer_fingerprint=self.fingerprint,
            offsets=pack_ids(_offsets(self.tokens)),
            data=b"".join(self.tokens),
            classes=self.classes,
            rule=tokenizer_pb2.TextRule.ValueType(self.rule),
            strip_first_space=self.strip_first_space,
            verified=self.verified,
        )

    @classmethod
    def from_proto(cls, message: tokenizer_pb2.GetTextTableResponse) -> TextTable:
        """The table as it arrived. Raises ValueError when its parts do not fit together or its rule is unknown."""
        offsets = unpack_ids(message.offsets)
        if not offsets or offsets[0] != 0 or offsets[-1] != len(message.data):
            raise ValueError("the offsets of a text table do not span its data")
        tokens = tuple(message.data[start:end] for start, end in itertools.pairwise(offsets))
        return cls(
            message.tokenizer_fingerprint, tokens, message.classes, TextRule(message.rule), message.strip_first_space, message.verified
        )


def _offsets(tokens: Sequence[bytes]) -> list[int]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return offsets
