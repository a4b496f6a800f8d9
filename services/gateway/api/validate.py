"""From typed requests to `Wanted`: ranges, combinations, messages and prompts, as OpenAI and vLLM check them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from services.gateway.api.requests import ChatRequest, CompletionRequest, ContentPart, GenerationRequest, Message
from services.gateway.wanted import ClientSampling, Prompt, Shown, Wanted
from tokenloom.tokenizer.v1 import tokenizer_pb2

MAX_TEMPERATURE = 100.0
MAX_TIMEOUT = 7 * 24 * 3600.0
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CACHE_SALT_BYTES = 1024
# What OpenAI and vLLM give a completion whose request is silent.
COMPLETION_MAX_TOKENS = 16
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_CHARS_PER_TOKEN = 4
_INT64 = range(-(2**63), 2**63)
_UINT32 = range(2**32)
_INT32 = range(-(2**31), 2**31)
# What a client's salt begins with, so that it is neither the empty one of the common space nor that of another kind (a tenant).
_CACHE_SALT = b"cache_salt:"


def want_chat(request: ChatRequest, model: str, label: str, *, max_sequences: int) -> Wanted:
    """What a chat request asks for, in `max_sequences` choices at most. `label` is the client's x-request-id.

    Raises TokenloomError naming the parameter at fault.
    """
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    sampling = _sampling(request, max_tokens, name)
    messages = _messages(request.messages)
    generate, proceed = request.add_generation_prompt is not False, request.continue_final_message is True
    if proceed and request.add_generation_prompt:
        raise _invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    messages_json = msgspec.json.encode(messages)
    chat = tokenizer_pb2.Chat(
        messages_json=messages_json,
        add_generation_prompt=generate and not proceed,
        continue_final_message=proceed,
        template_kwargs_json=msgspec.json.encode(kwargs) if kwargs else b"",
    )
    prompt = Prompt(tokenizer_pb2.EncodeRequest(chat=chat, request_label=label), max(len(messages_json) // _CHARS_PER_TOKEN, 1), "messages")
    return _want(request, model, (prompt,), sampling, max_sequences)


def want_completion(request: CompletionRequest, model: str, label: str, *, max_sequences: int) -> Wanted:
    """What a completion request asks for, prompts times choices being `max_sequences` at most.

    Raises TokenloomError naming the parameter at fault.
    """
    max_tokens = request.max_tokens if request.max_tokens is not None else COMPLETION_MAX_TOKENS
    sampling = _sampling(request, max_tokens, "max_tokens")
    items = _prompt_items(request.prompt)
    if len(items) > max_sequences:
        raise _invalid(f"prompt: {len(items)} prompts exceed the limit of {max_sequences} in one request", "prompt")
    names = ["prompt"] if len(items) == 1 else [f"prompt[{index}]" for index in range(len(items))]
    prompts = tuple(_prompt(item, name, label) for item, name in zip(items, names, strict=True))
    return _want(request, model, prompts, sampling, max_sequences)


def _want(request: GenerationRequest, model: str, prompts: tuple[Prompt, ...], sampling: ClientSampling, max_sequences: int) -> Wanted:
    stream, options = request.stream is True, request.stream_options
    if options is not None and not stream:
        raise _invalid("stream_options is only allowed when stream is true", "stream_options")
    if request.timeout is not None:
        _check("timeout", request.timeout, 0 < request.timeout <= MAX_TIMEOUT, f"in (0, {MAX_TIMEOUT:g}] seconds")
    salt = _salt(request.cache_salt)
    for prompt in prompts:
        prompt.request.hash_salt = salt
    priority = request.priority or 0
    _check("priority", priority, priority in _INT32, "a signed 32-bit integer")
    return Wanted(
        model=model,
        prompts=prompts,
        sampling=sampling,
        n=_choices(request, len(prompts), max_sequences),
        priority=priority,
        stream=stream,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.include_usage is True and options.continuous_usage_stats is True,
        timeout=request.timeout,
        shown=Shown(return_token_ids=request.return_token_ids is True),
    )


def _choices(request: GenerationRequest, prompts: int, max_sequences: int) -> int:
    n = 1 if request.n is None else request.n
    _check("n", n, n >= 1, "at least 1")
    if n * prompts > max_sequences:
        raise _invalid(f"n: {n} choices of {prompts} prompts exceed the limit of {max_sequences} sequences in one request", "n")
    if request.best_of not in (None, n):
        raise TokenloomError(ErrorCode.UNSUPPORTED, "best_of is not supported by this server yet, unless it equals n", param="best_of")
    return n


def _salt(cache_salt: str | None) -> bytes:
    """What a prompt's block hashes are mixed with: other salts, and none, never find its blocks (PROTOCOL.md rule 11)."""
    if cache_salt is None:
        return b""
    if not cache_salt:
        raise _invalid("cache_salt must not be empty; leave it out to share the common cache", "cache_salt")
    salt = cache_salt.encode()
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise _invalid(f"cache_salt exceeds the limit of {MAX_CACHE_SALT_BYTES} bytes", "cache_salt")
    return _CACHE_SALT + salt


def _sampling(request: GenerationRequest, max_tokens: int | None, max_tokens_name: str) -> ClientSampling:
    if max_tokens is not None:
        _check(max_tokens_name, max_tokens, max_tokens >= 1, "at least 1")
    if request.temperature is not None:
        allowed = 0 <= request.temperature <= MAX_TEMPERATURE
        _check("temperature", request.temperature, allowed, f"in [0, {MAX_TEMPERATURE:g}]")
    if request.top_p is not None:
        _check("top_p", request.top_p, 0 < request.top_p <= 1, "in (0, 1]")
    if request.top_k is not None:
        _check("top_k", request.top_k, request.top_k >= -1, "-1 or 0 (off), or at least 1")
    if request.min_p is not None:
        _check("min_p", request.min_p, 0 <= request.min_p <= 1, "in [0, 1]")
    if request.seed is not None:
        _check("seed", request.seed, request.seed in _INT64, "a signed 64-bit integer")
    min_tokens = request.min_tokens or 0
    _check("min_tokens", min_tokens, min_tokens >= 0, "at least 0")
    if max_tokens is not None and min_tokens > max_tokens:
        raise _invalid(f"min_tokens ({min_tokens}) must not exceed {max_tokens_name} ({max_tokens})", "min_tokens")
    return ClientSampling(
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_name,
        min_tokens=min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos is True,
        stop=_stops(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise _invalid(f"stop: {len(stops)} strings exceed the limit of {MAX_STOPS}", "stop")
    for index, text in enumerate(stops):
        name = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise _invalid(f"{name} must not be empty", name)
        if len(text.encode()) > MAX_STOP_BYTES:
            raise _invalid(f"{name} exceeds the limit of {MAX_STOP_BYTES} bytes", name)
    return stops


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and len(ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid(f"stop_token_ids: {len(ids)} ids exceed the limit of {MAX_STOP_TOKEN_IDS}", "stop_token_ids")
    for index, token_id in enumerate(ids or ()):
        _check(f"stop_token_ids[{index}]", token_id, token_id in _UINT32, "a token id")
    return tuple(dict.fromkeys(ids or ()))


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the template sees them: content flattened to one string, absent fields left out."""
    if not messages:
        raise TokenloomError(ErrorCode.EMPTY_PROMPT, "messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, path: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        roles = ", ".join(sorted(_ROLES))
        raise _invalid(f"{path}.role must be one of {roles}; got {message.role[:64]!r}", f"{path}.role")
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message.content, f"{path}.content")}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    return rendered


def _content(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, path: str) -> str:
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise _invalid(f"{path}.text is required", f"{path}.text")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise TokenloomError(
        ErrorCode.UNSUPPORTED, f"{path}: content of type {part.type[:64]!r} is not supported; this model reads text only", param=path
    )


def _prompt_items(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise TokenloomError(ErrorCode.EMPTY_PROMPT, "prompt must not be empty", param="prompt")
    if type(prompt[0]) is int:
        return [_ids(prompt, "prompt")]
    return [_item(item, f"prompt[{index}]", type(prompt[0])) for index, item in enumerate(prompt)]


def _item(item: Any, name: str, kind: type) -> str | list[int]:
    if kind is str and isinstance(item, str):
        return item
    if kind is list and isinstance(item, list):
        return _ids(item, name)
    raise _invalid(f"{name}: prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", name)


def _ids(items: list[Any], name: str) -> list[int]:
    if not items:
        raise TokenloomError(ErrorCode.EMPTY_PROMPT, f"{name} must not be empty", param=name)
    for index, item in enumerate(items):
        if type(item) is not int or item not in _UINT32:
            raise _invalid(f"{name}[{index}] must be a token id", f"{name}[{index}]")
    return items


def _prompt(item: str | list[int], name: str, label: str) -> Prompt:
    if isinstance(item, str):
        return Prompt(tokenizer_pb2.EncodeRequest(text=item, request_label=label), max(len(item) // _CHARS_PER_TOKEN, 1), name)
    ids = tokenizer_pb2.TokenIds(ids=pack_ids(item))
    return Prompt(tokenizer_pb2.EncodeRequest(token_ids=ids, request_label=label), len(item), name)


def _check(name: str, value: float, allowed: bool, rule: str) -> None:
    # A JSON integer has any number of digits; beyond 64 bits it neither converts to a float nor is worth printing.
    if isinstance(value, int) and value.bit_length() > 64:
        raise _invalid(f"{name} must be {rule}; the number is too large", name)
    if not allowed or not math.isfinite(value):
        raise _invalid(f"{name} must be {rule}; got {value}", name)


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
