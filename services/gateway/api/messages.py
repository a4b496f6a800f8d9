"""From the parts that a parser gives to OpenAI's messages, whole and in deltas."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET

from libs.text.table import TextTable
from services.gateway.api.responses import ChatMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from services.gateway.parsers.base import CallArguments, CallBegins, Content, MessageParser, Part, Reasoning
from services.gateway.parsers.completeness import Completeness
from services.gateway.streamer import Change

_random = random.SystemRandom()


def new_call_id() -> str:
    """A fresh id for a tool call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def new_mistral_call_id() -> str:
    """The same in the one form that Mistral's templates take back: nine letters and digits."""
    return "".join(_random.choices(string.ascii_letters + string.digits, k=9))


class MessageReader:
    """One choice's text on its way into a message: what `parser` makes of it (None: all of it is content), as it becomes certain.

    `show_reasoning` False leaves the reasoning out. `calls`: what is known of its tool calls; `reasoned`: whether there was any reasoning.
    """

    __slots__ = ("_new_id", "_parser", "_show_reasoning", "calls", "reasoned")

    def __init__(
        self, parser: MessageParser | None = None, new_id: Callable[[], str] = new_call_id, *, show_reasoning: bool = True
    ) -> None:
        self._parser, self._new_id, self._show_reasoning = parser, new_id, show_reasoning
        self.calls = Completeness()
        self.reasoned = False

    def parts(self, change: Change) -> list[Part]:
        """What a change adds to the message; with the ending everything that was held back."""
        if self._parser is None:
            return [Content(change.text)] if change.text else []
        parts = self._parser.push(change.text) if change.text else []
        if change.ending is not None:
            parts = [*parts, *self._parser.finish()]
        self.calls.see(parts)
        self.reasoned = self.reasoned or any(isinstance(part, Reasoning) for part in parts)
        return parts if self._show_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    def delta(self, parts: Iterable[Part]) -> Delta:
        """The parts as one delta: texts joined, one entry per call."""
        content, reasoning = _texts(parts)
        calls: dict[int, ToolCallDelta] = {}
        for part in parts:
            if isinstance(part, CallBegins):
                calls[part.index] = ToolCallDelta(part.index, self._new_id(), "function", FunctionDelta(part.name, ""))
            elif isinstance(part, CallArguments):
                _add_fragment(calls, part)
        return Delta(
            content=content or UNSET,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=list(calls.values()) or UNSET,
        )

    def message(self, parts: Sequence[Part]) -> ChatMessage:
        """All parts of a choice as its message."""
        content, reasoning = _texts(parts)
        names = {part.index: part.name for part in parts if isinstance(part, CallBegins)}
        arguments: dict[int, list[str]] = {index: [] for index in names}
        for part in parts:
            if isinstance(part, CallArguments):
                arguments[part.index].append(part.fragment)
        calls = [ToolCall(id=self._new_id(), function=FunctionCall(name, "".join(arguments[index]))) for index, name in names.items()]
        return ChatMessage(
            content=content if content or not (calls or reasoning) else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


def _texts(parts: Iterable[Part]) -> tuple[str, str]:
    """Content and reasoning, each joined."""
    content = "".join([part.text for part in parts if isinstance(part, Content)])
    return content, "".join([part.text for part in parts if isinstance(part, Reasoning)])


def _add_fragment(calls: dict[int, ToolCallDelta], part: CallArguments) -> None:
    call = calls.setdefault(part.index, ToolCallDelta(part.index, function=FunctionDelta()))
    assert isinstance(call.function, FunctionDelta), "every entry is made with its function"
    call.function.arguments = (call.function.arguments or "") + part.fragment


def count_until(table: TextTable, token_ids: Sequence[int], end: str) -> int:
    """How many tokens there are up to the one with which the first `end` in their text is complete; all, where it never is."""
    marker, tail = end.encode(), b""
    for count, token_id in enumerate(token_ids, 1):
        tail += table.token_bytes(token_id)
        if marker in tail:
            return count
        tail = tail[-len(marker) :]
    return len(token_ids)
