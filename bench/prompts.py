"""Deterministic pseudo-random prompts of a wished length: words without a tokenizer, or token ids whose number is exact.

The same seed gives the same prompts on every machine. Prompts differ from their first token on, so that a server's prefix cache finds
nothing but the prefix that they are meant to share.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# Common short words: with the space before it, each is one token in the vocabularies of common models, so words stand for tokens.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part place case week
company system program question work government number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line end member law car city community name
president team minute idea body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How long prompts are, in tokens: `prefix_len` that all share, then `input_len` of each prompt's own."""

    input_len: int
    prefix_len: int = 0


def word_prompts(shape: PromptShape, count: int, seed: int) -> list[str]:
    """`count` texts of as many words as `shape` has tokens; what a server makes of them is in its usage."""
    draw = random.Random(seed)
    prefix = draw.choices(_WORDS, k=shape.prefix_len)
    return [" ".join(prefix + draw.choices(_WORDS, k=shape.input_len)) for _ in range(count)]


def token_prompts(shape: PromptShape, count: int, seed: int, vocabulary: list[int]) -> list[list[int]]:
    """`count` lists of token ids drawn from `vocabulary`, each exactly as long as `shape` says."""
    draw = random.Random(seed)
    prefix = draw.choices(vocabulary, k=shape.prefix_len)
    return [prefix + draw.choices(vocabulary, k=shape.input_len) for _ in range(count)]


def ordinary_ids(directory: Path) -> list[int]:
    """The token ids of a model directory's tokenizer.json but for the added ones, which may mean the end of a text or of a turn.

    Raises ValueError where the directory has no tokenizer.json that can be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return sorted(token for token in tokenizer.get_vocab().values() if token not in added)
