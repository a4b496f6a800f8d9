"""How a response is shown: log-probabilities, echo, special tokens."""

from __future__ import annotations

from services.gateway.api.checks import check, invalid, unsupported
from services.gateway.api.policy import Policy
from services.gateway.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.wanted import Shown, ToolUse


def chat_shown(request: ChatRequest, policy: Policy, tools: ToolUse | None = None) -> Shown:
    """What a chat's response shows. `tools`: the calls that its text is parsed for. Raises TokenloomError naming the parameter at fault."""
    top = request.top_logprobs
    if top is not None:
        _check_alternatives("top_logprobs", top)
        if top and request.logprobs is not True:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return Shown(
        logprobs=(top or 0) if request.logprobs else None,
        logprobs_param="top_logprobs",
        prompt_logprobs=_prompt_logprobs(request),
        tokens_as_ids=_tokens_as_ids(request, policy),
        return_token_ids=request.return_token_ids is True,
        keep_special_tokens=request.skip_special_tokens is False,
        tools=tools,
        reasoning=policy.reasoning,
        include_reasoning=request.include_reasoning is not False,
    )


def completion_shown(request: CompletionRequest, policy: Policy) -> Shown:
    """What a completion's response shows. Raises TokenloomError naming the parameter at fault."""
    if request.logprobs is not None:
        _check_alternatives("logprobs", request.logprobs)
    echo = request.echo is True
    return Shown(
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        echo=echo,
        echo_only=echo and request.max_tokens == 0,
        tokens_as_ids=_tokens_as_ids(request, policy),
        return_token_ids=request.return_token_ids is True,
        keep_special_tokens=request.skip_special_tokens is False,
    )


def _tokens_as_ids(request: GenerationRequest, policy: Policy) -> bool:
    asked = request.return_tokens_as_token_ids
    return policy.tokens_as_ids if asked is None else asked


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    count = request.prompt_logprobs
    if count is None:
        return None
    _check_alternatives("prompt_logprobs", count)
    if request.stream:
        raise unsupported("prompt_logprobs are not supported with stream; ask for the whole response", "prompt_logprobs")
    return count


def _check_alternatives(name: str, count: int) -> None:
    check(name, count, 0 <= count < 2**31, "at least 0")
