"""The bodies that clients get, as types. Fields that are UNSET are left out of the JSON."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """What the output's tokens were for."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Alternative(Struct):
    """A token that could have stood at a position. `logprob`: natural logarithm, at least -9999; `bytes`: what it adds to the text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token of a chat's output."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion's tokens, a list per column. `text_offset`: characters of the choice's text before each token.
    The first token of a prompt has no log-probability.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """A token at a position of a prompt, in vLLM's shape; `rank` from 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per position: id -> token. Null for the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class FunctionCall(Struct):
    """What a tool call calls. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call that the model makes."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    """The assistant's message of a response. `content` is null where there are only calls or only reasoning. `reasoning` is the same text
    as `reasoning_content`, under the name that vLLM's newer versions give it.
    """

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
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
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    """More of a call: its name once, then fragments of its arguments, which join to the text of a JSON object."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """More of the tool call `index`; id and type come once, with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
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
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


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


class Reason(Struct):
    """Why a new request would not be served now; `code` is a label of libs.errors."""

    code: str
    message: str


class Readiness(Struct):
    """Response of GET /ready."""

    ready: bool
    reasons: list[Reason]


class Version(Struct):
    """Response of GET /version."""

    version: str
