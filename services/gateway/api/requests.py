"""The bodies of OpenAI's API that clients send, as types, as far as they are supported. A field that is null counts as absent."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class StreamOptions(Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chats and completions have in common. `timeout` is in seconds."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None


class ContentPart(Struct):
    """A part of a message's content; only text has a meaning here."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    """A call that the assistant made. `arguments`: a JSON object, as text in OpenAI's shape."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True):
    """One entry of a message's tool_calls."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct):
    """One message of a chat. `reasoning_content` and vLLM's newer `reasoning`: an earlier answer's, for templates that show it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
