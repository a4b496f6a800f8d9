"""Bodies that a client should not send: valid ones with a few things wrong in them; and a whole stack that they are sent to."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from tests.support.gateway_core import Stack, running_stack

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"

Body = dict[str, Any]

_TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
_TURNS = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "why"},
    {"role": "tool", "tool_call_id": "1", "content": "seen", "name": "look"},
]
_SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 7, "stop": ["q"], "stop_token_ids": [3], "min_tokens": 2,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 2.5}, "n": 2,
    "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [1, 2, 3, 4],
}  # fmt: skip
_REST = {
    "model": "tiny", "user": "u", "cache_salt": "s", "priority": 0, "timeout": 60, "return_token_ids": True,
    "truncate_prompt_tokens": 8, "add_special_tokens": True, "response_format": {"type": "text"}, "vllm_xargs": {},
}  # fmt: skip
_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "pattern": "a+"}}}

# Bodies that are served as they are. The stack's model knows expressions of one kind: 2x5 is five multiples of two.
VALID: tuple[tuple[str, Body], ...] = (
    (CHAT, {"messages": _MESSAGES, "max_tokens": 8}),
    (CHAT, {"messages": _MESSAGES, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    (CHAT, {"messages": _TURNS, "max_tokens": 8, **_SAMPLING}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 8, **_REST, **_STREAM}),
    (CHAT, {"messages": _TURNS, "max_tokens": 8, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False, **_STREAM}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 8, "guided_regex": "2x5", "chat_template_kwargs": {"a": 1}}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 8, "continue_final_message": True, "add_generation_prompt": False, "documents": [{}]}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 8, "structured_outputs": {"regex": "3x4"}, "reasoning_effort": "low"}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 8}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 8, **_SAMPLING, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 8, **_REST, **_STREAM}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 8, "best_of": 2, "n": 1, "return_tokens_as_token_ids": True}),
    (TOKENIZE, {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True}),
    (TOKENIZE, {"messages": _TURNS, "tools": [_TOOL], "add_generation_prompt": True}),
    (DETOKENIZE, {"tokens": [1, 2, 3], "model": "tiny"}),
)  # fmt: skip


_GENERATING = [case for case in VALID if case[0] in (CHAT, COMPLETIONS)]


class Raw(str):
    """Text that stands in the body as it is, valid JSON or not."""


def _deep(opening: str, closing: str, levels: int) -> Raw:
    return Raw(opening * levels + "1" + closing * levels)


# What stands where something else should.
_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3.0, 0.5, -0.0, 1e-320, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30,
    "", " ", "x", "0", "null", "\x00", "\u202e\u200b", "\U0001f469\u200d\U0001f467", "e\u0301" * 20, "\ufeff", "\ufffd\uffff",
    "\u65e5\u672c\u8a9e", "x" * 3000, "{{ messages }}", "%s%n", "<|im_end|>", "2x5",
    [], [[]], [None], [0], [-1], ["", "x"], [1, "x"], ["x", 1.5, None, {}], [0] * 1500, ["x"] * 70, [[1], "x"], list(range(40)),
    {}, {"": ""}, {"type": "text"}, {"type": "function"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    {"$ref": "#"}, {"name": "x", "parameters": {"type": "object"}}, {"regex": "(a+)+$"}, {"choice": []}, {"json": _SCHEMA},
    {"structures": [], "triggers": []}, {"5": 101}, {"1": None}, {str(number): 0.5 for number in range(40)},
    Raw("NaN"), Raw("-Infinity"), Raw("1e400"), Raw("-1e400"), Raw("1" * 400), Raw("1.0e2"), Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'),
    Raw('{"a": 1, "a": [2], "a": "3"}'), _deep("[", "]", 90), _deep('{"a":', "}", 200), _deep("[", "]", 3000),
)  # fmt: skip
# Of a body as it is written: the text is broken. Few cases have this, for nothing behind the parser sees them.
_BROKEN: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda body, chance: body[: chance.randrange(len(body))],
    lambda body, chance: body + b"}",
    lambda body, chance: b"[" + body + b"]",
    lambda body, chance: b"\xef\xbb\xbf" + body,
    lambda body, chance: body.replace(b'"', b"'", 2),
    lambda body, chance: body[:-1] + b', "\xff\xfe": 1}',
    lambda body, chance: body[:-1] + b",}",
    lambda body, chance: body.decode().encode("utf-16"),
)
_KNOWN = sorted({name for _, body in VALID for name in body} | {"functions", "suffix", "guided_json", "guided_choice", "guided_grammar"})


def fuzzed(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` paths and bodies; equal seeds give equal ones."""
    chance = random.Random(seed)
    for _ in range(count):
        path, valid = chance.choice(_GENERATING if chance.random() < 0.85 else VALID)
        body: Any = copy.deepcopy(valid)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            _spoil(body, chance)
        text = written(body)
        yield path, chance.choice(_BROKEN)(text, chance) if chance.random() < 0.06 else text


def written(body: Any) -> bytes:
    """A body as JSON, what is Raw in it as it is."""
    marked: list[Raw] = []
    text = json.dumps(_marked(body, marked), ensure_ascii=len(marked) % 2 == 0)
    return re.sub(r'"raw-(\d+)-raw"', lambda found: marked[int(found[1])], text).encode()


def _marked(value: Any, marked: list[Raw]) -> Any:
    if isinstance(value, Raw):
        marked.append(value)
        return f"raw-{len(marked) - 1}-raw"
    if isinstance(value, dict):
        return {key: _marked(item, marked) for key, item in value.items()}
    return [_marked(item, marked) for item in value] if isinstance(value, list) else value


def _spoil(body: Body, chance: random.Random) -> None:
    """One thing wrong, or only unusual, anywhere in the body."""
    kind = chance.random()
    if kind < 0.25:  # what is known and does not belong here, or says something else
        _, other = chance.choice(VALID)
        name = chance.choice(sorted(other))
        body[name] = copy.deepcopy(other[name])
    elif kind < 0.4:
        body[chance.choice(_KNOWN)] = _strange(chance)
    elif kind < 0.45:
        body[chance.choice(("", "\U0001f600", "__proto__", "x" * 200, "self", "messages "))] = _strange(chance)
    else:
        _spoil_within(body, chance)


def _strange(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(_STRANGE))


def _spoil_within(body: Body, chance: random.Random) -> None:
    places = list(_places(body))
    if not places:
        return
    parent, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.2:
        del parent[key]
    elif kind < 0.35:
        parent[key] = None
    elif kind < 0.42:
        parent[key] = [parent[key]]
    elif kind < 0.47:
        parent[key] = {"value": parent[key]}
    elif kind < 0.55 and isinstance(parent, list):
        parent.extend([parent[key]] * 300)
    elif kind < 0.75 and isinstance(parent[key], str | int | float):
        parent[key] = chance.choice([value for value in _STRANGE if type(value) is type(parent[key])] or [parent[key]])
    else:
        parent[key] = _strange(chance)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _verdict(constraint: Constraint) -> TokenloomError | None:
    """The model's world has constraints of one kind; all others are as wrong to it as a broken schema is to a real compiler."""
    if re.fullmatch(r"([1-9]|[1-3]\d)x\d{1,2}", constraint.text) and not constraint.begin_after:
        return None
    return TokenloomError(ErrorCode.INVALID_CONSTRAINT, "no constraint of this model", param=constraint.param)


@contextlib.asynccontextmanager
async def fuzz_stack(folder: Path) -> AsyncIterator[Stack]:
    """A gateway, a real scheduler and a worker that models its blocks, small enough that what is generated without a limit is short."""
    worker = {"max_model_len": 96, "blocks": 96, "verdict": _verdict}
    async with running_stack(folder, worker=worker, gateway={"max_prompts": 4, "max_body_bytes": 64 * 1024}) as stack:
        yield stack
