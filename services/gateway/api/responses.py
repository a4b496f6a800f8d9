"""The bodies that clients get, as types. Fields that are UNSET are left out of the JSON."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


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
