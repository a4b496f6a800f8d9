"""From typed requests to `Wanted`: ranges, combinations, messages and prompts, as OpenAI and vLLM check them."""

from __future__ import annotations

from libs.constraints import Constraint, ConstraintKind
from services.gateway.api.checks import INT32, check, invalid, unsupported
from services.gateway.api.constraint_fields import backend_of, constraint_of, size_of
from services.gateway.api.message_fields import chat_prompt
from services.gateway.api.policy import Policy
from services.gateway.api.prompt_fields import prompts_of
from services.gateway.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.api.sampling_fields import bad_words_of, sampling_of
from services.gateway.api.shown_fields import chat_shown, completion_shown
from services.gateway.parsers.planning import ToolPlan, plan_tools
from services.gateway.wanted import ClientSampling, Prompt, Shown, Wanted
from tokenloom.tokenizer.v1 import tokenizer_pb2

MAX_TIMEOUT = 7 * 24 * 3600.0
MAX_CACHE_SALT_BYTES = 1024
# Of a request's parameters over all its choices: each travels to the scheduler with its own.
MAX_PARAMETER_BYTES = 8 * 1024 * 1024
# What a client's salt begins with, so that it is neither the empty one of the common space nor that of another kind (a tenant).
_CACHE_SALT = b"cache_salt:"


def want_chat(request: ChatRequest, model: str, label: str, policy: Policy) -> Wanted:
    """What a chat request asks for. `label` is the client's x-request-id. Raises TokenloomError naming the parameter at fault."""
    plan = plan_tools(
        request.tools, request.tool_choice, parallel=request.parallel_tool_calls, format=policy.tool_format, auto=policy.auto_tools
    )
    asked = constraint_of(request)
    shown = chat_shown(request, policy, plan.use if _allows_calls(asked) else None)
    prompt = chat_prompt(request, plan.tools_json, label, policy)
    return _want(request, model, (prompt,), shown, _joined(asked, plan), policy)


def _joined(asked: Constraint | None, plan: ToolPlan) -> Constraint | None:
    """The constraint of the body, or that of its tools; not both."""
    if asked is not None and plan.constraint is not None:
        message = f"{asked.param} contradicts tool_choice: an output that must be a tool call keeps to the tool's schema"
        raise invalid(message, asked.param)
    return plan.constraint if asked is None else asked


def _allows_calls(constraint: Constraint | None) -> bool:
    """Whether a model may still choose to call a tool: an output that is all JSON, or all of a choice, is content and no call."""
    return constraint is None or constraint.kind is ConstraintKind.STRUCTURAL_TAG


def want_completion(request: CompletionRequest, model: str, label: str, policy: Policy) -> Wanted:
    """What a completion request asks for. `label` is the client's x-request-id. Raises TokenloomError naming the parameter at fault."""
    shown = completion_shown(request, policy)
    prompts = prompts_of(request.prompt, label, max_prompts=policy.max_sequences)
    return _want(request, model, prompts, shown, constraint_of(request), policy)


def _want(
    request: GenerationRequest, model: str, prompts: tuple[Prompt, ...], shown: Shown, constraint: Constraint | None, policy: Policy
) -> Wanted:
    stream, options = request.stream is True, request.stream_options
    if options is not None and not stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if request.timeout is not None:
        check("timeout", request.timeout, 0 < request.timeout <= MAX_TIMEOUT, f"in (0, {MAX_TIMEOUT:g}] seconds")
    sampling = sampling_of(request, shown)
    _prepare_prompts(request, prompts)
    priority = request.priority or 0
    check("priority", priority, priority in INT32, "a signed 32-bit integer")
    n, best_of = _choices(request, len(prompts), policy.max_sequences)
    _check_weight(sampling, constraint, (best_of or n) * len(prompts))
    return Wanted(
        model=model,
        prompts=prompts,
        sampling=sampling,
        n=n,
        best_of=best_of,
        priority=priority,
        stream=stream,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.include_usage is True and options.continuous_usage_stats is True,
        timeout=request.timeout,
        constraint=constraint,
        constraint_backend=backend_of(request),
        shown=shown,
        keep_last=_keep_last(request),
    )


def _prepare_prompts(request: GenerationRequest, prompts: tuple[Prompt, ...]) -> None:
    """What the tokenizer is told of every prompt; bad words it spells with the first."""
    salt, words = _salt(request.cache_salt), bad_words_of(request)
    special = tokenizer_pb2.SPECIAL_TOKENS_UNSPECIFIED
    if request.add_special_tokens is not None:
        special = tokenizer_pb2.SPECIAL_TOKENS_ADD if request.add_special_tokens else tokenizer_pb2.SPECIAL_TOKENS_NONE
    for prompt in prompts:
        prompt.request.hash_salt, prompt.request.special_tokens = salt, special
    prompts[0].request.bad_words.extend(words)


def _keep_last(request: GenerationRequest) -> int:
    count = request.truncate_prompt_tokens
    if count is None:
        return 0
    check("truncate_prompt_tokens", count, count == -1 or 1 <= count < 2**31, "-1 (what fits), or at least 1")
    return count


def _choices(request: GenerationRequest, prompts: int, max_sequences: int) -> tuple[int, int | None]:
    """How many are shown of each prompt, and how many are generated for that, None for as many."""
    n = 1 if request.n is None else request.n
    check("n", n, n >= 1, "at least 1")
    _check_sequences("n", n, prompts, max_sequences)
    best_of = request.best_of
    if best_of is None or best_of == n:
        return n, None
    if not isinstance(request, CompletionRequest):
        raise unsupported("best_of is not supported in chats, unless it equals n", "best_of")
    check("best_of", best_of, best_of > n, f"at least n ({n})")
    if request.stream:
        raise invalid("best_of must equal n where the response is streamed: the best are known at the end", "best_of")
    _check_sequences("best_of", best_of, prompts, max_sequences)
    return n, best_of


def _check_weight(sampling: ClientSampling, constraint: Constraint | None, sequences: int) -> None:
    sizes = {"logit_bias": 8 * len(sampling.logit_bias), "allowed_token_ids": 4 * len(sampling.allowed_token_ids)}
    if constraint is not None:
        sizes[constraint.param] = size_of(constraint)
    if sequences * sum(sizes.values()) > MAX_PARAMETER_BYTES:
        name = max(sizes, key=lambda name: sizes[name])
        raise invalid(f"{name}: {sizes[name]} bytes for each of {sequences} choices exceed the limit of {MAX_PARAMETER_BYTES}", name)


def _check_sequences(name: str, count: int, prompts: int, limit: int) -> None:
    if count * prompts > limit:
        raise invalid(f"{name}: {count} choices of {prompts} prompts exceed the limit of {limit} sequences in one request", name)


def _salt(cache_salt: str | None) -> bytes:
    """What a prompt's block hashes are mixed with: other salts, and none, never find its blocks (PROTOCOL.md rule 11)."""
    if cache_salt is None:
        return b""
    if not cache_salt:
        raise invalid("cache_salt must not be empty; leave it out to share the common cache", "cache_salt")
    salt = cache_salt.encode()
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise invalid(f"cache_salt exceeds the limit of {MAX_CACHE_SALT_BYTES} bytes", "cache_salt")
    return _CACHE_SALT + salt
