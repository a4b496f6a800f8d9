"""The bodies of OpenAI's API that clients send, as types, as far as they are supported. A field that is null counts as absent."""

from __future__ import annotations

from typing import Any

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


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


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
