"""Random JSON schemas whose values are short, for constrained outputs of a small model: a function of the seed alone."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("id", "name", "kind", "size", "tags", "next", "ok", "at")
_WORDS = ("red", "green", "blue", "north", "south", "yes", "no", "é😀")
_PATTERNS = ("^[a-z]{1,4}$", "^[A-Z][0-9]{2}$", r"^\d{1,3}-\w{1,2}$")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of an object or of a list with nested parts, references, alternatives, patterns and bounds."""
    draw = random.Random(seed)
    definitions = {"leaf": _leaf(draw), "pair": _object(draw, depth=1)}
    root = _object(draw, depth=2) if draw.random() < 0.8 else _array(draw, depth=2)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", **root, "$defs": definitions}


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_leaf] * 5
    roll = draw.random()
    if roll < 0.15:
        return {"$ref": f"#/$defs/{draw.choice(('leaf', 'pair') if depth > 1 else ('leaf',))}"}
    if roll < 0.3 and depth:
        return {"anyOf": [_leaf(draw), _leaf(draw)]}
    if roll < 0.55 and depth:
        return _object(draw, depth - 1)
    if roll < 0.7 and depth:
        return _array(draw, depth - 1)
    return draw.choice(kinds)(draw)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _leaf(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-20, 20)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 100)},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": draw.randint(1, 6)},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"enum": draw.sample([*_WORDS, 1, None, True], draw.randint(1, 4))},
        {"const": draw.choice(_WORDS)},
        {"type": "string", "format": draw.choice(("date", "uuid"))},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        {"type": "number", "minimum": 0, "maximum": 1},
    ]
    return draw.choice(leaves)
