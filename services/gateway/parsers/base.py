"""What a parser gives: parts of a message, in order.

However a text is cut into pieces, the parts that a parser gives for them join to the same: equal neighbours (two of Content, two of
Reasoning, two of CallArguments of one index) are one when their texts are joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the message says. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before it. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call begins: `index` counts them from 0; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`. Never empty.

    All fragments of a call join to a JSON object, unless the output ends within it or the model writes what is no JSON: then they are as
    much as was right (see services.gateway.parsers.completeness, which tells them apart).
    """

    index: int
    fragment: str


Part = Content | Reasoning | CallBegins | CallArguments


class MessageParser(Protocol):
    """A state machine over one choice's text. What it costs is linear in the text, whole or in pieces."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain."""
        ...

    def finish(self) -> list[Part]:
        """The rest, once the output has ended; what began as a call and is none comes out as Content. Called once."""
        ...
