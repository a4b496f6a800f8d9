"""Streamed answers of the real model, joined, are its whole ones field by field: 50 prompts with stops, emoji, CJK, tools and schemas."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.joining import flat_choice, joined_choices
from tests.support.mesh import Mesh, sse

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits, separated by commas.",
    "Reply with the emoji \U0001f642\U0001f680 and nothing else.",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f\u3069\u3053\u3067\u3059\u304b\uff1f",
    "\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f",
    "Count from one to ten.",
    "Write a line of Python that prints \u201ehello\u201c.",
    "Repeat after me: \u0416\u0443\u043a, na\u00efve, \u20ac5, \U0001f469\u200d\U0001f469\u200d\U0001f467.",
    "What is 2 + 2?",
    "Say hello in five languages.",
)
BEGINNINGS = (
    "Emoji of animals: \U0001f436\U0001f431\U0001f42d\U0001f439",
    "\u4e00\u3001\u4e8c\u3001\u4e09\u3001",
    "The quick brown fox",
    "1, 2, 3, 4,",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]},
    },
}


def _chats() -> list[dict[str, Any]]:
    plain = [{"content": text} for text in QUESTIONS]
    stopped = [{"content": text, "stop": ["\u4eac", ".", ",", "\U0001f642", "the"], "logprobs": True} for text in QUESTIONS]
    called = [{"content": f"{text} Weather in Paris?", "tools": [WEATHER], "tool_choice": "required"} for text in QUESTIONS[:5]]
    free = [{"content": text, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2} for text in QUESTIONS[5:]]
    schemas = [{"content": text, "response_format": SCHEMA} for text in QUESTIONS[::2]]
    cases = [*plain, *stopped, *called, *free, *schemas]
    return [{**case, "messages": [{"role": "user", "content": case.pop("content")}]} for case in cases]


def _completions() -> list[dict[str, Any]]:
    listed = [{"prompt": text, "logprobs": 3, "echo": True} for text in BEGINNINGS]
    stopped = [{"prompt": text, "stop": ["5", " dog", "\u3001", "\U0001f430"], "include_stop_str_in_output": True} for text in BEGINNINGS]
    return [*listed, *stopped, *({"prompt": list(BEGINNINGS[index:]), "skip_special_tokens": False} for index in range(5))]


async def _compare(client: httpx.AsyncClient, api: str, body: dict[str, Any]) -> None:
    path, body = ("/v1/chat/completions" if api == "chat" else "/v1/completions"), {**body, "temperature": 0, "return_token_ids": True}
    body["max_tokens"] = 20 if api == "completion" else 32
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)
    whole = answer.json()
    async with client.stream("POST", path, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
        chunks = [chunk async for chunk in sse(response)]
    expected = [flat_choice(choice, api) for choice in whole["choices"]]
    assert joined_choices(chunks, api, len(expected)) == expected, body
    if body.get("tool_choice") == "required":
        assert expected[0]["tool_calls"][0]["name"] == "get_weather"
    usages = [{name: usage[name] for name in ("prompt_tokens", "completion_tokens")} for usage in (chunks[-1]["usage"], whole["usage"])]
    assert usages[0] == usages[1], body


@pytest.mark.composes("greedy", "streaming", "stop strings", "logprobs", "structured output", "tools", "prompt list")
async def test_fifty_prompts(mesh: Mesh) -> None:
    cases = [*(("chat", body) for body in _chats()), *(("completion", body) for body in _completions())]
    assert len(cases) == 50
    slots = asyncio.Semaphore(12)

    async def one(client: httpx.AsyncClient, api: str, body: dict[str, Any]) -> None:
        async with slots:
            await _compare(client, api, {"model": mesh.model, **body})

    async with mesh.client() as client, asyncio.TaskGroup() as group:
        for api, body in cases:
            group.create_task(one(client, api, body))
