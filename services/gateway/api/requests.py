"""The bodies of OpenAI's API that clients send, as types, as far as they are supported. A field that is null counts as absent."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from services.gateway.tools import Tool, ToolChoiceParam


class StreamOptions(Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True, rename={"definition": "schema"}):
    """`json_schema` of a response_format. Every schema is kept to; `strict: false` leaves objects open that do not say they are closed."""

    name: str
    definition: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's response_format, and vLLM's structural tags: `structures` and `triggers`, or the newer `format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's structured_outputs: exactly one kind, and options. A schema or a structural tag may come as JSON text."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chats and completions have in common. `timeout` is in seconds. The `guided_*` and `structural_tag` are vLLM's older names of
    what is in `structured_outputs`.
    """

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
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | dict[str, Any] | None = None
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
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
