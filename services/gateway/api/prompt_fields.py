"""A completion's prompts: texts, and ids as they are."""

from __future__ import annotations

from typing import Any

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from services.gateway.api.checks import UINT32, invalid
from services.gateway.wanted import Prompt
from tokenloom.tokenizer.v1 import tokenizer_pb2

CHARS_PER_TOKEN = 4


def prompts_of(prompt: str | list[Any], label: str, *, max_prompts: int) -> tuple[Prompt, ...]:
    """The prompts of a completion. `label` is the client's x-request-id. Raises TokenloomError naming the one at fault."""
    items = _prompt_items(prompt)
    if len(items) > max_prompts:
        raise invalid(f"prompt: {len(items)} prompts exceed the limit of {max_prompts} in one request", "prompt")
    names = ["prompt"] if len(items) == 1 else [f"prompt[{index}]" for index in range(len(items))]
    return tuple(_prompt(item, name, label) for item, name in zip(items, names, strict=True))


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
    raise invalid(f"{name}: prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", name)


def _ids(items: list[Any], name: str) -> list[int]:
    if not items:
        raise TokenloomError(ErrorCode.EMPTY_PROMPT, f"{name} must not be empty", param=name)
    for index, item in enumerate(items):
        if type(item) is not int or item not in UINT32:
            raise invalid(f"{name}[{index}] must be a token id", f"{name}[{index}]")
    return items


def _prompt(item: str | list[int], name: str, label: str) -> Prompt:
    if isinstance(item, str):
        return Prompt(tokenizer_pb2.EncodeRequest(text=item, request_label=label), max(len(item) // CHARS_PER_TOKEN, 1), name)
    ids = tokenizer_pb2.TokenIds(ids=pack_ids(item))
    return Prompt(tokenizer_pb2.EncodeRequest(token_ids=ids, request_label=label), len(item), name)
