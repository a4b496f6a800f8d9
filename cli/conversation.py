"""What a chat consists of: its messages, settings of its requests, and the file that it can be saved to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.answer import Answer
from cli.client import ApiError, WrongUsage
from cli.json_text import decode, encode

# As requests have them; system messages become the conversation's own.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(slots=True)
class Conversation:
    """`sampling` are parameters of every request (temperature, max_tokens ...), `tools` the tools that the model may call.

    `answers` are the answers so far, whose counts /stats shows. Between two turns `messages` can be sent with one more of the user's: many
    templates want the roles to alternate, and a result for each call. A turn that fails is taken back to `unanswered`.
    """

    model: str
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    unanswered: dict[str, Any] | None = None
    _turn: int = 0

    def body(self) -> dict[str, Any]:
        """The next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        tools = {"tools": self.tools} if self.tools else {}
        # Usage in every chunk: an answer that is stopped gets no last one.
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return {"model": self.model, "messages": [*system, *self.messages], **tools, **options, **self.sampling}

    def begin(self, message: dict[str, Any]) -> None:
        """A turn begins with a message of the user."""
        self._turn, self.unanswered = len(self.messages), None
        self.messages.append(message)

    def take(self, answer: Answer) -> None:
        """The model has answered, whole or as far as it was let."""
        self.answers.append(answer)
        self.messages.append(answer.to_message())

    def result_of(self, call_id: str, result: str) -> None:
        """A call that the model wanted has been made."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def withdraw(self) -> None:
        """Takes the turn back: its message waits in `unanswered`."""
        if len(self.messages) > self._turn:
            self.unanswered = self.messages[self._turn]
            del self.messages[self._turn :]

    def settle(self) -> None:
        """Ends the turn. Calls without all their results are dropped; where nothing of the last answer is left then, it is taken back."""
        last = self.messages[-1] if len(self.messages) > self._turn else None
        if last is None or (last["role"] == "assistant" and "tool_calls" not in last and last["content"]):
            return
        answers = [at for at in range(self._turn, len(self.messages)) if self.messages[at]["role"] == "assistant"]
        if not answers or not self.messages[answers[-1]]["content"]:
            self.withdraw()
            return
        self.messages[answers[-1]].pop("tool_calls", None)
        del self.messages[answers[-1] + 1 :]

    def restore(self, before: list[dict[str, Any]]) -> None:
        """After another try that failed: an answer that there was is there again."""
        if self.unanswered is not None and len(before) > len(self.messages):
            self.messages[:], self.unanswered = before, None

    def take_back(self) -> dict[str, Any] | None:
        """The user's last message, to be asked again; what came after it is gone. None: there is none."""
        if self.unanswered is not None:
            return self.unanswered
        last = max((at for at, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            return None
        message = self.messages[last]
        del self.messages[last:]
        return message

    def reset(self) -> None:
        """Begins anew, with the same settings."""
        self.messages.clear()
        self.unanswered = None

    def save(self, path: Path) -> None:
        """Writes it as JSON. Raises OSError, and ApiError for what no file can hold."""
        kept = {"model": self.model, "system": self.system, "sampling": self.sampling, "tools": self.tools, "messages": self.messages}
        try:
            encode(kept)
        except ValueError as error:
            raise ApiError(f"the conversation cannot be saved: {error}") from None
        path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Goes on with a conversation that was saved, or with a list of messages as requests have it; the model stays the one in use.

        Raises ApiError for a file that holds none, OSError.
        """
        try:
            kept = decode(path.read_bytes())
        except ValueError as error:
            raise ApiError(f"{path} holds no JSON: {error}") from None
        kept = {"messages": kept} if isinstance(kept, list) else kept
        messages = kept.get("messages") if isinstance(kept, dict) else None
        if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ApiError(f"{path} holds no conversation: that is a list of messages, or an object with `messages`")
        for at, message in enumerate(messages):
            if not isinstance(message["role"], str) or message["role"] not in _ROLES:
                raise ApiError(f"{path} holds no conversation: the role of message {at} is none of {', '.join(sorted(_ROLES))}")
        sampling, tools = kept.get("sampling") or {}, kept.get("tools") or self.tools
        if not isinstance(sampling, dict) or not isinstance(tools, list):
            raise ApiError(f"{path} holds no conversation: `sampling` must be an object and `tools` a list")
        refuse_reserved(sampling)
        systems = [message for message in messages if message["role"] == "system"]
        self.messages = [message for message in messages if message["role"] != "system"]
        self.system = str(kept.get("system") or "\n\n".join(str(message.get("content")) for message in systems))
        self.sampling, self.tools = {**self.sampling, **sampling}, tools
        self._set_aside()

    def _set_aside(self) -> None:
        """A last message of the user that has no whole answer waits for /retry."""
        self._turn, self.unanswered = len(self.messages), None
        if self.messages and (self.messages[-1]["role"] != "assistant" or self.messages[-1].get("tool_calls")):
            question = self.take_back()
            if question is None:
                self.messages.clear()
            self._turn, self.unanswered = len(self.messages), question


def refuse_reserved(sampling: Mapping[str, Any]) -> None:
    """Raises WrongUsage for parameters with which a chat would be none: it has one streamed answer to its own messages."""
    if sampling.get("n") not in (None, 1):
        raise WrongUsage("a chat has one answer: n must be 1; `tokenloom complete --n` shows several")
    if sampling.get("stream") not in (None, True):
        raise WrongUsage("a chat streams its answers: stream must be true")
    if "messages" in sampling:
        raise WrongUsage("the messages of a chat are its own; /load takes some from a file")
