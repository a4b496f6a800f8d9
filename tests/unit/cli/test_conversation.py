"""A conversation can be gone on with after every ending of a turn: roles alternate, and each call has its result."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from cli.chat import Chat
from cli.client import ApiClient
from cli.conversation import Conversation
from cli.source import Source
from tests.support.scripted_api import ScriptedApi, delta, event, refuses, streams, text

CALL = delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}])
END = [delta("tool_calls"), b"data: [DONE]\n\n"]


def stopped(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise KeyboardInterrupt


# Made anew for each request: a stream can be read once.
ANSWERS = [
    lambda: streams(text("whole")),
    lambda: streams(text("")),
    lambda: streams([CALL, *END]),
    lambda: streams([delta(content="beside a call"), CALL, *END]),
    lambda: streams([CALL, delta("length"), b"data: [DONE]\n\n"]),
    lambda: streams([delta(content="broken"), event({"error": {"message": "gone"}})]),
    lambda: refuses(400, "invalid", "refused"),
    lambda: streams(stopped()),
    lambda: streams(stopped(delta(content="stopped"))),
    lambda: streams(stopped(CALL)),
    lambda: streams(stopped(CALL, END[0])),
]


class RandomUser(Source):
    """Says something, asks again, interrupts; gives results, or none. Leaves after a dozen lines."""

    def __init__(self, console: Console, chance: random.Random) -> None:
        super().__init__(console, io.StringIO())
        self.interactive, self._chance, self._left = True, chance, 12

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def line(self, prompt: str) -> str | None:
        self._left -= 1
        if self._left < 0:
            return None
        if self._chance.random() < 0.15:
            raise KeyboardInterrupt
        if prompt.startswith("result of"):
            return self._chance.choice(["it rains", "it rains", None])
        return self._chance.choice(["hi", "hi", "/retry"])


def last_role(messages: list[dict[str, Any]]) -> str:
    """Goes through the messages as a strict template does."""
    before, awaited = "assistant", set()
    for message in messages:
        role = message["role"]
        if role == "tool":
            awaited.remove(message["tool_call_id"])
        else:
            assert not awaited, messages
            assert (role == "user") is (before == "assistant"), messages
        if role == "assistant":
            assert message["content"] or message["tool_calls"], messages
            awaited = {call["id"] for call in message.get("tool_calls", ())}
        before = role
    return before


@pytest.mark.parametrize("seed", range(8))
def test_whatever_ends_the_turns_every_request_is_one_that_a_strict_template_takes(seed):
    chance = random.Random(seed)
    for _ in range(20):
        api = ScriptedApi(lambda body: chance.choice(ANSWERS)()(body))
        console, talk = Console(file=io.StringIO(), force_terminal=True, width=80), Conversation("tiny")
        with ApiClient("http://h", "", api) as client:
            Chat(client, talk, console, Console(file=io.StringIO()), source=RandomUser(console, chance), markdown=False).run()
        assert {last_role(body["messages"]) for body in api.bodies} <= {"user", "tool"}
        assert last_role(talk.messages) == "assistant", "the user's turn"
