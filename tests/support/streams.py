"""Completions as clients read them: what was wished for, what has come so far, and the moments that a test waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.mesh import sse

# Seconds for a moment that must come, on a machine of any speed; a test that gets there has failed.
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A completion to ask for: `count` tokens after `prompt`, whatever they are. Greedy without a seed, else drawn at temperature 1."""

    prompt: tuple[int, ...]
    count: int
    seed: int | None = None

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        sampling: dict[str, Any] = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        body = {"model": model, "prompt": list(self.prompt), "max_tokens": self.count, "ignore_eos": True, "return_token_ids": True}
        return {**body, **sampling, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {})}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got of a completion, but for what differs between runs."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Reader:
    """A client that reads one streamed completion. `begun` is set by its first token, `cached_tokens` comes with the usage."""

    wish: Wish
    ids: list[int] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cached_tokens: int = 0
    answer: Answer | None = None

    async def read(self, client: httpx.AsyncClient, model: str, *, leave_after: int | None = None) -> None:
        """Reads to the end, or goes away once it has `leave_after` tokens. Fails on an error, a second [DONE] or a missing one."""
        text, finish_reason, usage = "", "", {}
        async with client.stream("POST", "/v1/completions", json=self.wish.body(model, stream=True)) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            chunks = sse(response)
            try:
                async for chunk in chunks:
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        text += choice["text"]
                        finish_reason = choice["finish_reason"] or finish_reason
                        self._take(choice["token_ids"])
                    usage = chunk["usage"] or usage
                    if leave_after is not None and len(self.ids) >= leave_after:
                        return
            finally:
                await chunks.aclose()
        self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.answer = Answer(tuple(self.ids), text, finish_reason, usage["prompt_tokens"], usage["completion_tokens"])

    def _take(self, ids: list[int]) -> None:
        self.ids += ids
        if self.ids:
            self.begun.set()


def ask(url: str, model: str, wish: Wish) -> Answer:
    """The whole completion, alone and not streamed."""
    response = httpx.post(f"{url}/v1/completions", json=wish.body(model, stream=False), timeout=PATIENCE, trust_env=False)
    assert response.status_code == 200, response.text
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    return Answer(tuple(choice["token_ids"]), choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


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
