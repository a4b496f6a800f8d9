"""The bodies of OpenAI's API as types: requests as far as they are supported, responses as they are written.

A field that is null counts as absent. Response fields that are UNSET are left out of the JSON.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


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


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    """The assistant's message of a response."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Response of a chat."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    """One choice of a completion, whole or as a part of a chunk."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Response of a completion, and each event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ErrorDetail(Struct):
    """An error in OpenAI's shape; `code` is the label of libs.errors."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct):
    """Body of every response that is an error."""

    error: ErrorDetail


class ModelCard(Struct, kw_only=True):
    """A served model. `max_model_len` (tokens, prompt plus output) is null until a worker has attached."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenloom"
    root: str
    parent: None = None
    max_model_len: int | None
    permission: list[str] = []


class ModelList(Struct, kw_only=True):
    """Response of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]
