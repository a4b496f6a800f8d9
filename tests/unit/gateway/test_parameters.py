"""What /openapi.json says of a field's values is what the checks let pass: each bound is sent, and what lies beyond it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.decode import decode_chat, decode_completion
from services.gateway.api.openapi import document
from services.gateway.api.parameters import PARAMETERS
from services.gateway.api.policy import Policy
from services.gateway.api.validate import want_chat, want_completion
from services.gateway.config import GatewayConfig

CONFIG = GatewayConfig(
    scheduler_address="unix:/s", tokenizer_address=["unix:/t"], served_model_name=["tiny"], trust_request_chat_template=True
)
SCHEMAS = document(CONFIG)["components"]["schemas"]
MESSAGE = {"role": "user", "content": "hi"}

Body = dict[str, Any]


def send_chat(fields: Body) -> None:
    want_chat(decode_chat(json.dumps({"messages": [MESSAGE], **fields}).encode()), "tiny", "", Policy.of(CONFIG))


def send_completion(fields: Body) -> None:
    want_completion(decode_completion(json.dumps({"prompt": "hi", **fields}).encode()), "tiny", "", Policy.of(CONFIG))


def send_message(fields: Body) -> None:
    send_chat({"messages": [{"role": "user", "content": "hi", **fields}]})


def send_part(fields: Body) -> None:
    send_message({"content": [{"type": "text", "text": "hi", **fields}]})


def send_structured(fields: Body) -> None:
    send_chat({"structured_outputs": fields})


SENDERS: dict[str, Callable[[Body], None]] = {
    "ChatRequest": send_chat,
    "CompletionRequest": send_completion,
    "StructuredOutputs": send_structured,
    "Message": send_message,
    "ContentPart": send_part,
}
# What a field needs beside it.
BESIDE: dict[str, Body] = {
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 16},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "look"}}]},
    "disable_additional_properties": {"json": {}},
    "whitespace_pattern": {"json": {}},
}

# Fields that an error knows by what they are part of.
CALLED = {"type": "content[0]"}


def probes(schema: Body) -> Iterator[tuple[Any, bool]]:
    """Values at each bound of a schema, and next to it on the other side; whether they are allowed."""
    for branch in schema.get("anyOf", [schema]):
        yield from _numbers(branch)
        for keyword, step, spelled in (("minLength", -1, "x"), ("maxLength", 1, "x")):
            if keyword in branch:
                yield spelled * branch[keyword], True
                yield spelled * (branch[keyword] + step), False
        yield from _arrays(branch)
        for value in branch.get("enum", ()):
            yield value, True
        if "enum" in branch:
            yield "what is in no list", False
        yield from _objects(branch)
    if "const" in schema.get("not", {}):
        yield schema["not"]["const"], False


def _numbers(branch: Body) -> Iterator[tuple[Any, bool]]:
    whole = branch.get("type") == "integer"
    if "exclusiveMinimum" in branch:
        yield branch["exclusiveMinimum"], False
        yield math.nextafter(branch["exclusiveMinimum"], math.inf), True
    for keyword, sign in (("minimum", -1), ("maximum", 1)):
        if keyword in branch:
            bound = branch[keyword]
            yield bound, True
            yield (bound + sign if whole else math.nextafter(bound, sign * math.inf)), False


def _arrays(branch: Body) -> Iterator[tuple[Any, bool]]:
    if "minItems" in branch:
        yield [], False
    if branch.get("type") != "array" or "type" not in branch.get("items", {}):
        return
    plain = branch["items"].get("minimum", "x")
    if "maxItems" in branch:
        yield [plain] * (branch["maxItems"] + 1), False
        yield [plain] * branch["maxItems"], True
    for value, allowed in probes(branch["items"]):
        yield [value], allowed


def _objects(branch: Body) -> Iterator[tuple[Any, bool]]:
    for value, allowed in _numbers(branch.get("additionalProperties", {})):
        yield {"5": value}, allowed
    if "propertyNames" in branch:
        yield from (({name: 1}, False) for name in ("05", "-1", "x", "", "1.5"))
    if "maxProperties" in branch:
        yield {str(number): 1 for number in range(branch["maxProperties"])}, True
        yield {str(number): 1 for number in range(branch["maxProperties"] + 1)}, False


def _cases() -> Iterator[Any]:
    for name, send in SENDERS.items():
        for field in PARAMETERS[name]:
            values = list(probes(SCHEMAS[name]["properties"][field]))
            if values:
                yield pytest.param(send, field, values, id=f"{name}.{field}")


@pytest.mark.parametrize(("send", "field", "values"), list(_cases()))
def test_the_documented_bounds_of_a_field_are_those_that_are_checked(send, field, values):
    for value, allowed in values:
        body = {**BESIDE.get(field, {}), field: value}
        if field == "max_tokens" and value == 0 and send is send_completion:
            body["echo"] = True
        if field == "best_of" and allowed and send is send_chat:
            body["n"] = value  # chats have no other
        if allowed:
            send(body)
            continue
        if field == "model":
            continue  # which names are served is asked elsewhere
        with pytest.raises(TokenloomError) as caught:
            send(body)
        assert caught.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_CONSTRAINT, ErrorCode.UNSUPPORTED, ErrorCode.EMPTY_PROMPT)
        assert CALLED.get(field, field) in (caught.value.param or ""), (caught.value.message, value)


def test_every_field_of_a_request_is_described_and_nothing_else():
    for name, parameters in PARAMETERS.items():
        assert parameters.keys() == SCHEMAS[name]["properties"].keys(), name
        assert all(SCHEMAS[name]["properties"][field]["description"] for field in parameters)
