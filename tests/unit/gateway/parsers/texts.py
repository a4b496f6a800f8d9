"""Texts of models, cut in every way, and what parsers make of them."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from services.gateway.parsers.base import CallArguments, CallBegins, Content, MessageParser, Part, Reasoning
from services.gateway.parsers.prose import joined

NewParser = Callable[[], MessageParser]


@dataclass
class Read:
    """A message as a client puts it together from parts: calls as (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def parts_of(new: NewParser, pieces: Iterable[str]) -> list[Part]:
    """The joined parts of a text that comes in pieces. Checks what holds for every parser: no empty part, calls begin in order and once,
    arguments belong to the call that begun last."""
    parser = new()
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    calls = 0
    for part in parts:
        match part:
            case Content(text) | Reasoning(text):
                assert text
            case CallBegins(index, name):
                assert name
                assert index == calls
                calls += 1
            case CallArguments(index, fragment):
                assert fragment
                assert index == calls - 1
    return joined(parts)


def read(new: NewParser, text: str) -> Read:
    """The message of a text: whole and one character at a time, which must be equal."""
    parts = parts_of(new, [text] if text else [])
    assert parts_of(new, text) == parts
    return message_of(parts)


def message_of(parts: Iterable[Part]) -> Read:
    """The parts as one message."""
    message = Read()
    for part in parts:
        match part:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallBegins(_, name):
                message.calls.append((name, ""))
            case CallArguments(index, fragment):
                name, arguments = message.calls[index]
                message.calls[index] = (name, arguments + fragment)
    return message


def after_each(new: NewParser, pieces: Iterable[str]) -> list[list[Part]]:
    """What each piece made certain, and at last what the end did."""
    parser = new()
    return [*(parser.push(piece) for piece in pieces), parser.finish()]


# What JSON can hold; texts with what stands in the formats themselves.
AWKWARD = [
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "</think>",
    '"',
    "\\",
    "'",
    "{",
    "]",
    "\n",
    "é",
    "😀",
    "\x07",
]
TEXTS = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=3)), max_size=4).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


@st.composite
def dumped(draw: st.DrawFn, value: Any) -> str:
    """A value as some model may write it."""
    indent = draw(st.sampled_from([None, None, 1]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces."""
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    bounds = [0, *(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds) if end > start]


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """The text with up to three changes: characters lost, doubled, replaced, the end cut off, something put in."""
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["cut", "lose", "double", "insert", "swap"])):
            case "cut":
                text = text[:at]
            case "lose":
                text = text[:at] + text[at + 1 :]
            case "double":
                text = text[:at] + text[at : at + 9] + text[at:]
            case "insert":
                text = text[:at] + draw(st.sampled_from([*AWKWARD, "[", "}", ",", ":", " ", "1", "1e5", "null", "(", ")", "="])) + text[at:]
            case "swap":
                text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    return text
