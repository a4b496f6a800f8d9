"""How tokens are chosen and when they end: ranges as OpenAI and vLLM have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.gateway.api.checks import INT64, UINT32, check, check_count, check_text, invalid
from services.gateway.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.wanted import ClientSampling, Shown

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_BYTES = 1024
MAX_XARGS_BYTES = 64 * 1024
# Ids of logit_bias, and of allowed_token_ids.
MAX_BIASES = 65_536
MAX_ALLOWED = 262_144
# What OpenAI and vLLM give a completion whose request is silent.
COMPLETION_MAX_TOKENS = 16
_XARG = (str, int, float)
_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def sampling_of(request: GenerationRequest, shown: Shown) -> ClientSampling:
    """Sampling and stopping of a request whose response shows `shown`. Raises TokenloomError naming the parameter at fault."""
    name, max_tokens = _max_tokens(request)
    if shown.echo_only:
        max_tokens = 1
    elif max_tokens is not None:
        check(name, max_tokens, max_tokens >= 1, "at least 1")
    _check_distribution(request)
    min_tokens = request.min_tokens or 0
    check("min_tokens", min_tokens, min_tokens >= 0, "at least 0")
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) must not exceed {name} ({max_tokens})", "min_tokens")
    return ClientSampling(
        max_tokens=max_tokens,
        max_tokens_param=name,
        min_tokens=min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos is True,
        stop=_stops(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids),
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}),
        allowed_token_ids=_allowed_token_ids(request.allowed_token_ids),
        include_stop_in_output=request.include_stop_str_in_output is True,
        logprobs=_needed_logprobs(request, shown),
        prompt_logprobs=_needed_prompt_logprobs(shown),
        extra_args_json=_extra_args(request.vllm_xargs),
    )


def _max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    if isinstance(request, CompletionRequest) and request.max_tokens is None:
        return "max_tokens", COMPLETION_MAX_TOKENS
    return "max_tokens", request.max_tokens


def _check_distribution(request: GenerationRequest) -> None:
    if request.temperature is not None:
        check("temperature", request.temperature, 0 <= request.temperature <= MAX_TEMPERATURE, f"in [0, {MAX_TEMPERATURE:g}]")
    if request.top_p is not None:
        check("top_p", request.top_p, 0 < request.top_p <= 1, "in (0, 1]")
    if request.top_k is not None:
        check("top_k", request.top_k, request.top_k >= -1, "-1 or 0 (off), or at least 1")
    if request.min_p is not None:
        check("min_p", request.min_p, 0 <= request.min_p <= 1, "in [0, 1]")
    if request.seed is not None:
        check("seed", request.seed, request.seed in INT64, "a signed 64-bit integer")
    if request.repetition_penalty is not None:
        # Logits are divided by it, in float32.
        allowed = 1e-6 <= request.repetition_penalty <= 1e6
        check("repetition_penalty", request.repetition_penalty, allowed, "greater than 0, between 1e-6 and 1e6")
    for name, penalty in (("presence_penalty", request.presence_penalty), ("frequency_penalty", request.frequency_penalty)):
        if penalty is not None:
            check(name, penalty, abs(penalty) <= MAX_PENALTY, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check_count("stop", len(stops), MAX_STOPS, "strings")
    for index, text in enumerate(stops):
        check_text("stop" if isinstance(stop, str) else f"stop[{index}]", text, MAX_STOP_BYTES)
    return stops


def _stop_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    check_count("stop_token_ids", len(ids or ()), MAX_STOP_TOKEN_IDS, "ids")
    return _ids("stop_token_ids", ids or ())


def _allowed_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not ids:
        raise invalid("allowed_token_ids must not be empty: nothing could be generated", "allowed_token_ids")
    check_count("allowed_token_ids", len(ids), MAX_ALLOWED, "ids")
    return _ids("allowed_token_ids", ids)


def _ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if ids and not (min(ids) >= 0 and max(ids) in UINT32):
        index = next(index for index, token_id in enumerate(ids) if token_id not in UINT32)
        check(f"{name}[{index}]", ids[index], False, "a token id")
    return tuple(dict.fromkeys(ids))


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Checked as a whole first: there may be as many as the vocabulary has ids."""
    check_count("logit_bias", len(bias), MAX_BIASES, "ids")
    values = bias.values()
    if bias and not -MAX_BIAS <= min(values) <= max(values) <= MAX_BIAS:
        key, value = next((key, value) for key, value in bias.items() if abs(value) > MAX_BIAS)
        check(f"logit_bias.{key[:20]}", value, False, f"in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
    try:
        ids = [*map(int, bias)]
    except ValueError:
        ids = []
    # One spelling per id, or "5" and "05" would be two biases of one.
    if [*map(str, ids)] != [*bias] or (bias and not (min(ids) >= 0 and max(ids) in UINT32)):
        wrong = next(key for key in bias if not (_ID.fullmatch(key) and int(key) in UINT32))
        raise invalid(f"logit_bias: {wrong[:20]!r} is not a token id", "logit_bias")
    return tuple((token_id, value) for token_id, value in zip(ids, values, strict=True) if value)


def bad_words_of(request: GenerationRequest) -> list[str]:
    """Texts that the output must not contain, each once. Raises TokenloomError naming the one at fault."""
    words = request.bad_words or []
    check_count("bad_words", len(words), MAX_BAD_WORDS, "texts")
    for index, word in enumerate(words):
        check_text(f"bad_words[{index}]", word, MAX_BAD_WORD_BYTES)
    return list(dict.fromkeys(words))


def _needed_logprobs(request: GenerationRequest, shown: Shown) -> int | None:
    """What is shown; the best of several are chosen by the tokens' own log-probabilities."""
    if shown.logprobs is None and request.best_of is not None and request.best_of > (request.n or 1):
        return 0
    return shown.logprobs


def _needed_prompt_logprobs(shown: Shown) -> int | None:
    asked = [count for count in (shown.prompt_logprobs, shown.logprobs if shown.echo else None) if count is not None]
    return max(asked, default=None)


def _extra_args(arguments: Mapping[str, Any] | None) -> bytes:
    if not arguments:
        return b""
    for key, value in arguments.items():
        for item in value if isinstance(value, list) else (value,):
            if not isinstance(item, _XARG) or isinstance(item, bool):
                raise invalid("vllm_xargs: values must be strings, numbers or lists of them", f"vllm_xargs.{key[:64]}")
    encoded = msgspec.json.encode(arguments)
    if len(encoded) > MAX_XARGS_BYTES:
        raise invalid(f"vllm_xargs exceeds the limit of {MAX_XARGS_BYTES} bytes", "vllm_xargs")
    return encoded
