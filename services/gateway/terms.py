"""What a request asks of the model that is served: checked once the mesh has told which that is, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

import msgspec

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.packing import unpack_ids
from libs.text.table import TextTable
from services.gateway.parsers.factory import needs_special_tokens, reasoning_format
from services.gateway.tokenizer_client import TokenizerClient
from services.gateway.wanted import Wanted
from tokenloom.scheduler.v1 import scheduler_pb2


def check_served(wanted: Wanted, facts: scheduler_pb2.ModelFacts) -> None:
    """Raises TokenloomError (400) for what this model's workers or this server's flags do not serve, naming the parameter."""
    _check_choices(wanted, facts)
    wanted.sampling.check_ids(facts)
    _check_logprobs(wanted, facts)
    _check_constraint(wanted, facts)
    if wanted.priority and not facts.priority_scheduling:
        raise _invalid(f"priority must be 0: this server does not run --scheduling-policy priority; got {wanted.priority}", "priority")
    if wanted.keep_last > facts.max_model_len:
        message = f"truncate_prompt_tokens must not exceed the context length {facts.max_model_len}; got {wanted.keep_last}"
        raise _invalid(message, "truncate_prompt_tokens")
    if wanted.sampling.extra_args_json and not facts.logits_processors:
        message = "vllm_xargs is for logits processors of the operator, and this server runs none"
        raise TokenloomError(ErrorCode.UNSUPPORTED, message, param="vllm_xargs")


class Thinking(Enum):
    """Where an output begins, as its prompt leaves it: `CLOSED`: behind the reasoning, or there is none; `OPENED`: within it; `FREE`: as is
    usual in the format.
    """

    CLOSED = auto()
    OPENED = auto()
    FREE = auto()


def constraint_of(wanted: Wanted, prompt_ids: bytes, tokens: TokenizerClient) -> Constraint | None:
    """The constraint of a prompt's choices: behind the reasoning, where there may be one.

    Raises TokenloomError UNSUPPORTED where the model has no one token that ends the reasoning.
    """
    constraint, parser = wanted.constraint, wanted.shown.reasoning
    if constraint is None or parser is None or thinking_of(wanted, prompt_ids, tokens.table) is Thinking.CLOSED:
        return constraint
    end = reasoning_format(parser).end
    if end not in tokens.added_tokens:
        message = f"{constraint.param} is not supported together with this server's reasoning parser: {end!r} is no token of this model"
        raise TokenloomError(ErrorCode.UNSUPPORTED, message, param=constraint.param)
    return replace(constraint, begin_after=(tokens.added_tokens[end],))


def thinking_of(wanted: Wanted, prompt_ids: bytes, table: TextTable | None) -> Thinking:
    """Where the outputs of a prompt begin.

    The end of the prompt decides: templates open the reasoning there, or close an empty one where it is switched off. In an answer that is
    continued the last marker decides.
    """
    if wanted.shown.reasoning is None:
        return Thinking.CLOSED
    form = reasoning_format(wanted.shown.reasoning)
    chat = wanted.prompts[0].request.chat
    if chat.continue_final_message:
        last = msgspec.json.decode(msgspec.json.decode(chat.messages_json, type=list[msgspec.Raw])[-1])["content"] or ""
        closed, opened = last.rfind(form.end), last.rfind(form.open) if form.open else -1
        return Thinking.FREE if closed == opened else Thinking.CLOSED if closed > opened else Thinking.OPENED
    if table is None:
        return Thinking.FREE
    tail = _tail(unpack_ids(prompt_ids), table, max(map(len, form.markers)))
    if tail.endswith(form.end.encode()):
        return Thinking.CLOSED
    return Thinking.OPENED if form.open and tail.endswith(form.open.encode()) else Thinking.FREE


def _tail(prompt: Sequence[int], table: TextTable, count: int) -> bytes:
    """What a prompt ends with, blanks aside: `count` bytes or more, where it has so many."""
    tail = b""
    for token_id in reversed(prompt):
        tail = (table.token_bytes(token_id) + tail).rstrip()
        if len(tail) >= count:
            break
    return tail


def keeps_special_tokens(wanted: Wanted, tokens: TokenizerClient) -> bool:
    """Whether special tokens are spelled in the text: for the client, or for the parsers, whose markers they are in some models."""
    return wanted.shown.keep_special_tokens or needs_special_tokens(wanted.shown, tokens.tool_format, tokens.special_tokens)


def keep_last(wanted: Wanted, facts: scheduler_pb2.ModelFacts) -> int:
    """Tokens that a prompt is cut to from the left; 0: it is not. What fits leaves room for max_tokens, or for one token."""
    if wanted.keep_last >= 0:
        return wanted.keep_last
    return max(facts.max_model_len - (wanted.sampling.max_tokens or 1), 1)


def _check_choices(wanted: Wanted, facts: scheduler_pb2.ModelFacts) -> None:
    if wanted.generated > 1 and wanted.sampling.temperature_for(facts) == 0:
        name = "n" if wanted.n > 1 else "best_of"
        message = f"{name} must be 1 with greedy sampling (temperature 0), where all choices are equal; got {wanted.generated}"
        raise _invalid(message, name)


def _check_logprobs(wanted: Wanted, facts: scheduler_pb2.ModelFacts) -> None:
    shown = wanted.shown
    for name, asked in ((shown.logprobs_param, shown.logprobs), ("prompt_logprobs", shown.prompt_logprobs)):
        if asked is not None and asked > facts.max_logprobs:
            raise _invalid(f"{name} must be at most {facts.max_logprobs} (--max-logprobs); got {asked}", name)


def _check_constraint(wanted: Wanted, facts: scheduler_pb2.ModelFacts) -> None:
    constraint, asked = wanted.constraint, wanted.constraint_backend
    if constraint is not None and not facts.constraint_backend:
        message = f"{constraint.param} is not supported: the workers of this server compile no constraints"
        raise TokenloomError(ErrorCode.UNSUPPORTED, message, param=constraint.param)
    if asked is not None and facts.constraint_backend not in ("", asked):
        message = f"guided_decoding_backend: this server compiles constraints by {facts.constraint_backend}, not by {asked[:64]!r}"
        raise _invalid(message, "guided_decoding_backend")


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
