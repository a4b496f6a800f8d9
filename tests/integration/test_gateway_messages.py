"""Tool calls and reasoning over HTTP, and as OpenAI's client reads them, whole and streamed."""

from __future__ import annotations

import json
import re

import openai
import pytest

from tests.support.gateway_fakes import FakeScheduler, say
from tests.support.gateway_process import events_of, running_gateway
from tests.support.joining import flat_choice, joined_choices

CALLS = '<tool_call>{"name": "f", "arguments": {"a": "\u20ac"}}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(say(f"Let me see.\n{CALLS}"))) as running:
        yield running


@pytest.mark.composes("tools", "streaming", "n", "logprobs")
async def test_streamed_calls_are_those_of_the_whole_response(gateway):
    fields = {"tools": TOOLS, "n": 2, "logprobs": True}
    whole = (await gateway.chat("hi", **fields)).json()
    chunks = events_of((await gateway.chat("hi", stream=True, **fields, **USAGE)).text)[:-1]
    expected = [flat_choice(choice, "chat") for choice in whole["choices"]]
    assert joined_choices(chunks, "chat", 2) == expected
    assert expected[0]["finish_reason"] == "tool_calls"
    assert [(call["name"], json.loads(call["arguments"])) for call in expected[1]["tool_calls"]] == [("f", {"a": "\u20ac"}), ("f", {})]
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


async def test_the_same_text_without_tools_is_content(gateway):
    (choice,) = (await gateway.chat("hi")).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"Let me see.\n{CALLS}", "stop")
    (choice,) = (await gateway.chat("hi", tools=TOOLS, tool_choice="none")).json()["choices"]
    assert "tool_calls" not in choice["message"]


@pytest.mark.composes("tools", "streaming")
async def test_openais_client_puts_calls_together(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        async with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as events:
            streamed = await events.get_final_completion()
    for answer in (whole, streamed):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("function", "f", '{"a": "\u20ac"}'),
            ("function", "f", "{}"),
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_mistrals_calls_have_ids_that_its_template_takes_back(tmp_path, stream):
    scheduler = FakeScheduler(say('[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}}]'))
    async with running_gateway(tmp_path, scheduler, tool_call_parser="mistral") as gateway:
        text = (await gateway.chat("hi", tools=TOOLS, stream=stream)).text
    (call_id,) = re.findall('"id":"([^"-]*)"', text)
    assert re.fullmatch("[A-Za-z0-9]{9}", call_id)


@pytest.mark.parametrize("include", [True, False])
async def test_reasoning_is_split_off_counted_and_may_be_left_out(tmp_path, include):
    scheduler = FakeScheduler(say("<think>hm</think>yes"))
    async with running_gateway(tmp_path, scheduler, reasoning_parser="qwen3") as gateway:
        whole = (await gateway.chat("hi", include_reasoning=include)).json()
        chunks = events_of((await gateway.chat("hi", stream=True, include_reasoning=include, **USAGE)).text)[:-1]
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning_content")) == ("yes", "hm" if include else None)
    assert joined_choices(chunks, "chat", 1) == [flat_choice(choice, "chat")]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
    assert chunks[-1]["usage"] == whole["usage"]
