"""Completions as clients read them: what was wished for, what has come so far, and the moments that a test waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.mesh import sse

# Seconds for a moment that must come, on a machine of any speed; a test that gets there has failed.
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A completion to ask for: `count` tokens after `prompt`, whatever they are, or fewer where `stop` comes before.

    Greedy without a seed, else drawn at temperature 1; `n` choices. `more`: a JSON object of further fields.
    """

    prompt: tuple[int, ...]
    count: int
    seed: int | None = None
    n: int = 1
    stop: str = ""
    more: str = "{}"

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {"model": model, "prompt": list(self.prompt), "max_tokens": self.count, "n": self.n}
        body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0 if self.seed is None else 1.0}
        body |= {} if self.seed is None else {"seed": self.seed}
        body |= ({"stop": self.stop} if self.stop else {}) | json.loads(self.more)
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One choice of a completion."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got of a completion, but for what differs between runs."""

    choices: tuple[ChoiceAnswer, ...]
    prompt_tokens: int
    completion_tokens: int

    @property
    def ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].ids


class Reader:
    """A client that reads one streamed completion. `begun` is set once every choice has a token, `cached_tokens` comes with the usage."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.begun = asyncio.Event()
        self.cached_tokens = 0
        self.answer: Answer | None = None
        self._choices: dict[int, dict[str, Any]] = {}

    @property
    def ids(self) -> list[int]:
        """The first choice's tokens so far."""
        return self._choices.get(0, {}).get("ids", [])

    async def read(self, client: httpx.AsyncClient, model: str, *, leave_after: int | None = None) -> None:
        """Reads to the end, or goes away once it has `leave_after` tokens. Fails on an error, a second [DONE] or a missing one."""
        usage: dict[str, Any] = {}
        async with client.stream("POST", "/v1/completions", json=self.wish.body(model, stream=True)) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async with aclosing(sse(response)) as chunks:
                async for chunk in chunks:
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        self._take(choice)
                    usage = chunk["usage"] or usage
                    if leave_after is not None and len(self.ids) >= leave_after:
                        return
        self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        choices = [self._choices[index] for index in range(self.wish.n)]
        parts = (ChoiceAnswer(tuple(choice["ids"]), choice["text"], choice["finish_reason"]) for choice in choices)
        self.answer = Answer(tuple(parts), usage["prompt_tokens"], usage["completion_tokens"])

    def _take(self, part: dict[str, Any]) -> None:
        choice = self._choices.setdefault(part["index"], {"ids": [], "text": "", "finish_reason": None})
        assert choice["finish_reason"] is None, f"something came after the end: {part}"
        choice["ids"] += part["token_ids"]
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        if len(self._choices) == self.wish.n and all(choice["ids"] for choice in self._choices.values()):
            self.begun.set()


def ask(url: str, model: str, wish: Wish) -> Answer:
    """The whole completion, alone and not streamed."""
    response = httpx.post(f"{url}/v1/completions", json=wish.body(model, stream=False), timeout=PATIENCE, trust_env=False)
    assert response.status_code == 200, response.text
    choices, usage = response.json()["choices"], response.json()["usage"]
    assert [choice["index"] for choice in choices] == list(range(wish.n))
    parts = (ChoiceAnswer(tuple(choice["token_ids"]), choice["text"], choice["finish_reason"]) for choice in choices)
    return Answer(tuple(parts), usage["prompt_tokens"], usage["completion_tokens"])


async def read_all(
    client: httpx.AsyncClient, model: str, wishes: Sequence[Wish], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Reader]:
    """Streams all wishes at once; `meanwhile` happens when each has its first token. Returns the readers, all at their end."""
    readers = [Reader(wish) for wish in wishes]
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(reader.read(client, model))
        for reader in readers:
            await reader.begun.wait()
        if meanwhile is not None:
            await meanwhile()
    return readers
