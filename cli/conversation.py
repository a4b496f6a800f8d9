"""What a chat consists of: its messages, settings of its requests, and the file that it can be saved to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.answer import Answer
from cli.client import ApiError


@dataclass(slots=True)
class Conversation:
    """`sampling` are parameters of every request (temperature, max_tokens ...), `tools` the tools that the model may call.

    `answers` are the answers so far, whose counts /stats shows.
    """

    model: str
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        tools = {"tools": self.tools} if self.tools else {}
        # Usage in every chunk: an answer that is stopped gets no last one.
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return {"model": self.model, "messages": [*system, *self.messages], **tools, **options, **self.sampling}

    def say(self, content: str) -> None:
        """The user says something."""
        self.messages.append({"role": "user", "content": content})

    def take(self, answer: Answer) -> None:
        """The model has answered, whole or as far as it was let."""
        self.answers.append(answer)
        self.messages.append(answer.to_message())

    def result_of(self, call_id: str, result: str) -> None:
        """A call that the model wanted has been made."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def unanswer(self) -> bool:
        """Takes back what came after the user's last message, to ask again; False: there is none."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def reset(self) -> None:
        """Begins anew, with the same settings."""
        self.messages.clear()

    def save(self, path: Path) -> None:
        """Writes it as JSON. Raises OSError."""
        kept = {"model": self.model, "system": self.system, "sampling": self.sampling, "tools": self.tools, "messages": self.messages}
        path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Goes on with a conversation that was saved, or with a list of messages as requests have it; the model stays the one in use.

        Raises ApiError for a file that holds none, OSError.
        """
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ApiError(f"{path} holds no JSON: {error}") from None
        kept = {"messages": kept} if isinstance(kept, list) else kept
        messages = kept.get("messages") if isinstance(kept, dict) else None
        if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ApiError(f"{path} holds no conversation: that is a list of messages, or an object with `messages`")
        systems = [message for message in messages if message["role"] == "system"]
        self.messages = [message for message in messages if message["role"] != "system"]
        self.system = str(kept.get("system") or "\n\n".join(str(message.get("content")) for message in systems))
        self.sampling = {**self.sampling, **(kept.get("sampling") or {})}
        self.tools = kept.get("tools") or self.tools
