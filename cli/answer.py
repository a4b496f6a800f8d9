"""A streamed chat answer put together again from its chunks, with its timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class View(Protocol):
    """Where an answer is shown while it comes."""

    def reasoning(self, text: str) -> None:
        """More of the reasoning before the answer."""
        ...

    def content(self, text: str) -> None:
        """More of the answer."""
        ...

    def finish(self, answer: Answer) -> None:
        """The answer is over, whole or not."""
        ...


@dataclass(slots=True)
class ToolCall:
    """A call that the model wants made; `arguments` is JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_message(self) -> dict[str, Any]:
        """As a message's tool_calls hold it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Answer:
    """One answer. `calls` are all that have begun. Times in seconds since the request was sent; `first` is None until something came. Token
    counts are the server's.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    stopped: bool = False
    first: float | None = None
    total: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def decode_seconds(self) -> float:
        """What the tokens after the first took; 0 where there were none, or the server counted none."""
        return self.total - self.first if self.first is not None and self.completion_tokens > 1 else 0.0

    @property
    def whole_calls(self) -> list[ToolCall]:
        """The calls that can be made and told of: all or none. In an answer that ended for any other reason the last may be cut off or
        broken, and a server refuses such a call in every request that tells of it.
        """
        return self.calls if self.finish_reason == "tool_calls" and not self.stopped else []

    def to_message(self) -> dict[str, Any]:
        """As the next request tells it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.whole_calls:
            message["tool_calls"] = [call.to_message() for call in self.whole_calls]
        return message

    def add_calls(self, deltas: list[dict[str, Any]]) -> None:
        """Adds the parts of calls that a chunk brings."""
        for delta in deltas:
            while len(self.calls) <= delta["index"]:
                self.calls.append(ToolCall())
            call, function = self.calls[delta["index"]], delta.get("function") or {}
            call.id = delta.get("id") or call.id
            call.name = function.get("name") or call.name
            call.arguments += function.get("arguments") or ""


def receive(chunks: Iterable[dict[str, Any]], answer: Answer, view: View, clock: Callable[[], float] = time.monotonic) -> None:
    """Reads a stream to its end into `answer`, shown as it comes.

    Ctrl-C ends it there: what has come stays, and `answer.stopped` says so. Errors of the stream pass, after the view has been told.
    """
    began = clock()
    try:
        for chunk in chunks:
            _take(chunk, answer, view, clock() - began)
    except KeyboardInterrupt:
        answer.stopped = True
    finally:
        answer.total = clock() - began
        view.finish(answer)


def _take(chunk: dict[str, Any], answer: Answer, view: View, elapsed: float) -> None:
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning, content = delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")
        calls = delta.get("tool_calls")
        if answer.first is None and (reasoning or content or calls):
            answer.first = elapsed
        if reasoning:
            answer.reasoning += reasoning
            view.reasoning(reasoning)
        if content:
            answer.content += content
            view.content(content)
        answer.add_calls(calls or [])
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
