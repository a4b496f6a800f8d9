"""Log-probabilities for tests: values that say which token and position they belong to."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from libs.logprobs import PackedLogprobs
from libs.packing import pack_ids


def packed(positions: Iterable[tuple[list[int], list[float], int]], alternatives: int = 0) -> PackedLogprobs:
    """Positions of (ids, values, rank): the token first, then its alternatives."""
    made = PackedLogprobs(alternatives)
    for ids, values, rank in positions:
        made.extend(PackedLogprobs(alternatives, bytearray(pack_ids(ids)), bytearray(array("f", values).tobytes()), [rank]))
    return made


def told(position: int, token: int, alternatives: int = 0) -> PackedLogprobs:
    """What a model that hashes would say of `token` at `position` of its sequence: the same whoever computes it. The first is undefined."""
    if not position:
        return packed([([token] + [0] * alternatives, [math.nan] * (alternatives + 1), 0)], alternatives)
    others = [(token + 1 + other) % 40 for other in range(alternatives)]
    values = [-(position + other / 64) for other in range(alternatives + 1)]
    return packed([([token, *others], values, 1 + (position + token) % 7)], alternatives)


def told_all(first: int, tokens: Iterable[int], alternatives: int = 0) -> PackedLogprobs:
    """The same of consecutive positions."""
    made = PackedLogprobs(alternatives)
    for position, token in enumerate(tokens, first):
        made.extend(told(position, token, alternatives))
    return made
