"""GET /openapi.json: what this gateway serves, as OpenAPI 3.1, made from its routes, types and checks. It differs with the configuration:
the served names, the limits that flags set, and the key that it asks for are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from libs.errors import ErrorCode
from services.gateway.api.chat import CHAT
from services.gateway.api.completions import COMPLETIONS
from services.gateway.api.fields import NO_EFFECT, REFUSED, REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from services.gateway.api.ops import VERSION
from services.gateway.api.requests import ChatRequest, CompletionRequest
from services.gateway.api.responses import ChatChunk, ChatCompletion, Completion, ErrorBody, ModelCard, ModelList, Readiness, Version
from services.gateway.api.schemas import Schema, components, ref
from services.gateway.api.tokenize import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from services.gateway.config import GatewayConfig
from services.gateway.guarded import GUARDED

_KEY_ERRORS = (ErrorCode.UNAUTHORIZED, ErrorCode.RATE_LIMITED, ErrorCode.STORE_UNAVAILABLE)
# What every endpoint that reads a body may answer.
_BODY_ERRORS = (
    ErrorCode.MALFORMED_JSON,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.UNSUPPORTED,
    ErrorCode.EMPTY_PROMPT,
    ErrorCode.PROMPT_TOO_LONG,
    ErrorCode.TEMPLATE_ERROR,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.BODY_TOO_LARGE,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
    ErrorCode.TOKENIZER_BUSY,
    ErrorCode.INTERNAL,
    ErrorCode.UNAVAILABLE,
    ErrorCode.DRAINING,
    ErrorCode.TOKENIZER_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED,
)
_GENERATION_ERRORS = (
    *_BODY_ERRORS,
    ErrorCode.INVALID_CONSTRAINT,
    ErrorCode.CANNOT_FIT,
    ErrorCode.DEAD_END,
    ErrorCode.OVER_WINDOW,
    ErrorCode.QUEUE_FULL,
    ErrorCode.CONSTRAINT_BUSY,
    ErrorCode.POISON_REQUEST,
    ErrorCode.NON_FINITE,
    ErrorCode.OUT_OF_MEMORY,
    ErrorCode.STEP_FAILED,
    ErrorCode.NO_WORKER,
    ErrorCode.SCHEDULER_UNAVAILABLE,
    ErrorCode.SESSION_LOST,
)
_STATUS = {
    400: "The request cannot be served as it is",
    401: "No valid key",
    404: "No such model",
    413: "The body is larger than this server takes",
    415: "The body is not plain application/json",
    422: "No token is left to sample: constraint, allowed_token_ids or a logits processor exclude each one",
    429: "A limit is reached; Retry-After says for how long",
    500: "The server failed; its log has the details",
    503: "Not now; Retry-After says when to try again",
    504: "The request's time is over",
}
_RETRY = (429, 503)
_TEXT: Schema = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. `path` is as OpenAPI writes it; `event` is what a stream consists of, where `stream` is true."""

    path: str
    name: str
    tag: str
    summary: str
    answer: type[Struct] | None = None
    body: type[Struct] | None = None
    event: type[Struct] | None = None
    errors: Sequence[ErrorCode] = ()
    example: Schema | None = None
    media: str = "application/json"

    @property
    def method(self) -> str:
        """In OpenAPI's spelling."""
        return "get" if self.body is None else "post"


OPERATIONS = (
    Operation(
        CHAT.route, "createChatCompletion", "Generation", "Answers a chat, whole or streamed",
        ChatCompletion, ChatRequest, ChatChunk, _GENERATION_ERRORS,
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32},
    ),
    Operation(
        COMPLETIONS.route, "createCompletion", "Generation", "Continues a prompt, or several, whole or streamed",
        Completion, CompletionRequest, Completion, _GENERATION_ERRORS, {"prompt": "The quick brown fox", "max_tokens": 16},
    ),
    Operation(
        TOKENIZE.route, "tokenize", "Tokens", "The token ids of a prompt or chat",
        TokenizeResponse, TokenizeRequest, None, _BODY_ERRORS, {"prompt": "The quick brown fox"},
    ),
    Operation(
        DETOKENIZE.route, "detokenize", "Tokens", "The text of token ids",
        DetokenizeResponse, DetokenizeRequest, None, _BODY_ERRORS, {"tokens": [1, 2, 3]},
    ),
    Operation("/v1/models", "listModels", "Models", "The served names", ModelList),
    Operation("/v1/models/{name}", "retrieveModel", "Models", "One served name", ModelCard, errors=(ErrorCode.MODEL_NOT_FOUND,)),
    Operation("/health", "health", "Operation", "200 while the process serves its loop"),
    Operation("/ready", "ready", "Operation", "Whether a new request would be served now; if not, why", Readiness),
    Operation("/version", "version", "Operation", "The version of this server", Version),
    Operation("/metrics", "metrics", "Operation", "Metrics for Prometheus", media="text/plain"),
)  # fmt: skip


def document(config: GatewayConfig) -> Schema:
    """The document of a gateway with this configuration."""
    guarded = GUARDED if config.api_key or config.api_keys_from_store else ()
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    answers = [kind for operation in OPERATIONS for kind in (operation.answer, operation.event) if kind is not None]
    schemas = components(bodies, [*answers, ErrorBody])
    _adapt(schemas, config)
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenloom",
            "version": VERSION,
            "summary": "OpenAI's API as vLLM's users know it",
            "description": "Null counts as absent. Unknown fields are ignored, fields that ask for what is not served are refused.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            operation.path: {operation.method: _operation(operation, operation.path.startswith(guarded))} for operation in OPERATIONS
        },
        "components": {"schemas": schemas},
    }
    if guarded:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _adapt(schemas: dict[str, Schema], config: GatewayConfig) -> None:
    """What the configuration says of the requests."""
    names = list(config.model_names)
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": [*names, None], "description": properties["model"]["description"]}
    for name, refused in (("ChatRequest", REFUSED_IN_CHATS), ("CompletionRequest", REFUSED_IN_COMPLETIONS)):
        schema = schemas[name]
        for field in ("n", "best_of"):
            schema["properties"][field]["anyOf"][0]["maximum"] = config.max_prompts
        idle = _names(NO_EFFECT - schema["properties"].keys())
        schema["description"] += (
            f" Without effect: {idle}. Refused with any value that asks for something: {_names({**REFUSED, **refused})}."
        )


def _names(fields: Any) -> str:
    return ", ".join(sorted(fields))


def _operation(operation: Operation, guarded: bool) -> Schema:
    found: Schema = {"operationId": operation.name, "tags": [operation.tag], "summary": operation.summary}
    if guarded:
        found["security"] = [{"key": []}]
    if "{name}" in operation.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    if operation.body is not None:
        content = {"schema": ref(operation.body), "example": operation.example}
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
    found["responses"] = {"200": _success(operation), **_failures(operation, guarded)}
    return found


def _success(operation: Operation) -> Schema:
    if operation.answer is None and operation.media == "application/json":
        return {"description": "An empty body"}
    schema = _TEXT if operation.answer is None else ref(operation.answer)
    content: Schema = {operation.media: {"schema": schema}}
    if operation.event is not None:
        content["text/event-stream"] = {
            "schema": {
                **_TEXT,
                "description": "With `stream`: server-sent events. The data of each is one x-event or, once, an x-error, which ends the "
                "stream; then `data: [DONE]`. Comments keep silent streams open.",
            },
            "x-event": ref(operation.event),
            "x-error": ref(ErrorBody),
        }
    return {"description": "The answer", "content": content}


def _failures(operation: Operation, guarded: bool) -> Schema:
    if operation.path == "/ready":
        return {"503": {"description": "A new request would not be served", "content": {"application/json": {"schema": ref(Readiness)}}}}
    by_status: dict[int, list[str]] = {}
    for code in (*operation.errors, *(_KEY_ERRORS if guarded else ())):
        by_status.setdefault(code.spec.http_status, []).append(code.spec.label)
    return {str(status): _failure(status, by_status[status]) for status in sorted(by_status)}


def _failure(status: int, labels: Sequence[str]) -> Schema:
    found: Schema = {
        "description": f"{_STATUS[status]}. `code`: {', '.join(labels)}",
        "content": {"application/json": {"schema": ref(ErrorBody)}},
    }
    if status in _RETRY:
        found["headers"] = {"retry-after": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}
    return found
