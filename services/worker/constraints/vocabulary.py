"""The ids that a model may sample, for a backend that is given them: the bytes of each, and which are no text.

Needs the `tokenizers` package, which comes with xgrammar; llguidance reads tokenizer.json by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.text.build import build_text_table
from libs.text.table import TokenClass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids 0 .. len(tokens) - 1. `special`: ids that never stand for text, whatever their bytes; `endings`: those that end a sequence."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    endings: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)


def read_vocabulary(directory: ModelDirectory) -> Vocabulary:
    """The vocabulary of a model directory, no wider than the model's logits.

    Raises TokenloomError(UNSUPPORTED) for a tokenizer whose ids have no bytes of their own, or a model without an end of sequence.
    """
    table = build_text_table(Tokenizer.from_file(str(directory.tokenizer_file)), directory.tokenizer_fingerprint)
    size = min(table.vocab_size, directory.config.vocab_size)
    return vocabulary_of(table.tokens[:size], table.classes[:size], directory.eos_token_ids)


def vocabulary_of(tokens: Sequence[bytes], classes: bytes, endings: Sequence[int]) -> Vocabulary:
    """A vocabulary of what each id spells and its class (libs.text.table.TokenClass). Raises as read_vocabulary."""
    ends = tuple(token for token in endings if token < len(tokens))
    if not ends:
        raise TokenloomError(ErrorCode.UNSUPPORTED, "the model names no end of sequence, so that constrained outputs could not end")
    silent = {token for token, kind in enumerate(classes) if kind in (TokenClass.SPECIAL, TokenClass.UNUSED) or not tokens[token]}
    return Vocabulary(tuple(tokens), frozenset(silent | set(ends)), ends)
