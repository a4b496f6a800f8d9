"""Random sentences of a constraint, and whether a text is one: through the very masks that a step uses."""

from __future__ import annotations

import json
import random

import numpy as np
from tokenizers import Tokenizer

from libs.constraints import Constraint
from libs.text.build import build_text_table
from services.worker.constraints.base import Backend
from services.worker.constraints.progress import Progress
from tests.support.constrained import grammar_of
from tests.support.tiny_llama import tiny_tokenizer_json

ENDINGS = (2, 0)
_TOKENIZER = Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
_TOKENS = build_text_table(_TOKENIZER, "tiny").tokens
_PRINTABLE = frozenset(token for token, text in enumerate(_TOKENS) if token > max(ENDINGS) and all(0x20 < byte < 0x7F for byte in text))


def progress_of(backend: Backend, constraint: Constraint, **options: bool) -> Progress:
    prepared = grammar_of(backend, constraint)
    found = Progress(prepared.grammar, width=9, endings=ENDINGS, begin_after=prepared.begin_after, **options)
    found.replay(())
    return found


def allowed(progress: Progress) -> set[int]:
    """Ids that may come next."""
    words = np.zeros(9, np.int32)
    progress.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def matches(backend: Backend, constraint: Constraint, text: str) -> bool:
    """Whether `text`, in the tokenizer's spelling, is a whole sentence."""
    progress = progress_of(backend, constraint)
    for token in _TOKENIZER.encode(text, add_special_tokens=False).ids:
        if progress.complete or token not in allowed(progress):
            return False
        progress.accept(token)
    return progress.complete or bool(allowed(progress) & set(ENDINGS))


def sentences(backend: Backend, constraint: Constraint, count: int, longest: int = 120) -> list[str]:
    """Texts of random walks that ended within `longest` bytes; mostly printable ASCII, so that they are short."""
    found, grammar = [], grammar_of(backend, constraint).grammar
    for seed in range(count):
        draw, progress, text = random.Random(seed), Progress(grammar, width=9, endings=ENDINGS), bytearray()
        progress.replay(())
        while not progress.complete and len(text) < longest:
            ids = allowed(progress)
            assert ids, f"a dead end after {bytes(text)!r}"
            if ids & set(ENDINGS) and draw.random() < 0.4:
                break
            spelled = sorted(ids - set(ENDINGS))
            plain = [token for token in spelled if token in _PRINTABLE]
            token = draw.choice(plain if plain and draw.random() < 0.9 else spelled)
            progress.accept(token)
            text += _TOKENS[token]
        if len(text) < longest:
            found.append(text.decode())
    return found
