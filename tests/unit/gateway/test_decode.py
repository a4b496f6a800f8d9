"""Whatever a client sends, decoding and validating end in a request or in an error of the table; never in anything else."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.decode import MAX_CONTAINERS, MAX_FIELD_BYTES, MAX_NESTING, decode_chat, decode_completion
from services.gateway.api.endpoint import read_body
from services.gateway.api.fields import NO_EFFECT, REFUSED
from services.gateway.api.policy import Policy
from services.gateway.api.requests import ChatRequest, CompletionRequest
from services.gateway.api.validate import want_chat, want_completion
from services.gateway.wanted import Wanted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *REFUSED, *NO_EFFECT, "other"})
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]) | JSON, "content": JSON})


def understand(body: bytes) -> list[Wanted | TokenloomError]:
    """Both APIs' view of a body."""
    found: list[Wanted | TokenloomError] = []
    for attempt in (
        lambda: want_chat(decode_chat(body), "m", "label", Policy(4)),
        lambda: want_completion(decode_completion(body), "m", "label", Policy(4)),
    ):
        try:
            found.append(attempt())
        except TokenloomError as error:
            found.append(error)
    faults = [outcome for outcome in found if isinstance(outcome, TokenloomError)]
    assert all(400 <= fault.code.spec.http_status < 500 and fault.message for fault in faults)
    return found


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_error(body):
    assert len(understand(body)) == 2


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE | JSON, max_size=3) | JSON, "prompt": JSON | st.lists(st.integers(), max_size=5)},
        optional={name: JSON for name in NAMES if name not in ("messages", "prompt")},
    )
)
def test_any_json_object_is_a_request_or_an_error(fields):
    assert len(understand(json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass"))) == 2


@given(st.integers(0, 3000), st.sampled_from(["[", '{"a":', '{"messages":[', '{"prompt":[']))
def test_any_depth_is_a_request_or_an_error(depth, opening):
    assert all(isinstance(outcome, TokenloomError) for outcome in understand(opening.encode() * (depth + 1)))


@given(st.text(max_size=50))
def test_text_reaches_the_tokenizer_unchanged(text):
    body = msgspec.json.encode({"messages": [{"role": "user", "content": text}], "prompt": text})
    chat, completion = understand(body)
    assert json.loads(chat.prompts[0].request.chat.messages_json) == [{"role": "user", "content": text}]
    assert completion.prompts[0].request.text == text


def test_no_field_is_in_two_lists():
    supported = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not NO_EFFECT & set(REFUSED)
    assert not supported & set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_may_be_null(name):
    body = msgspec.json.encode({"prompt": "a", name: None})
    assert decode_completion(body).prompt == "a"


@pytest.mark.parametrize(("name", "value"), [("n", True), ("presence_penalty", False), ("echo", 0), ("logprobs", True), ("best_of", "1")])
def test_a_boolean_is_no_number_and_a_number_no_boolean(name, value):
    with pytest.raises(TokenloomError):
        decode_completion(msgspec.json.encode({"prompt": "a", name: value}))


def test_long_unknown_names_are_cut_before_they_are_logged(monkeypatch):
    warned = []
    monkeypatch.setattr("services.gateway.api.decode._log.warning", lambda _event, **fields: warned.append(fields))
    decode_completion(msgspec.json.encode({"prompt": "a", **{f"{index}{'x' * 500}": 1 for index in range(100)}}))
    assert len(warned[0]["fields"]) == 20
    assert max(map(len, warned[0]["fields"])) == 64
    assert warned[0]["count"] == 100


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"messages": 1e400}', "invalid_request", "messages"),
        (b'{"a": {"b": [1, -1e999]}, "messages": []}', "invalid_request", "a"),
        (b"[1e400]", "invalid_request", None),
        (b'{"messages": 1e400, "\xff\xfe": 1}', "malformed_json", None),
        (b'{"messages": 1e400, "a', "malformed_json", None),
        (b'{"messages": 1e400, "a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed_json", None),
    ],
)
def test_a_number_that_nothing_can_hold_is_named_unless_more_is_wrong(body, code, param):
    for fault in understand(body):
        assert isinstance(fault, TokenloomError)
        assert (fault.code.spec.label, fault.param) == (code, param)


@pytest.mark.parametrize("field", ["documents", "chat_template_kwargs", "tools", "unknown"])
def test_a_body_has_so_many_levels_and_no_more(field):
    for levels, code in ((MAX_NESTING, "malformed_json"), (MAX_NESTING - 1, None), (990, "malformed_json")):
        value = b"[" * levels + b"]" * levels
        found = {
            fault.code.spec.label
            for fault in understand(b'{"messages": [], "prompt": "x", "%s": %s}' % (field.encode(), value))
            if isinstance(fault, TokenloomError)
        }
        assert found == {code} if code else "malformed_json" not in found


def test_an_error_does_not_repeat_a_long_value():
    for fault in understand(json.dumps({"messages": [], "prompt": "x", "response_format": {"type": "x" * 100_000}}).encode()):
        assert isinstance(fault, TokenloomError)
        assert fault.param == "response_format.type"
        assert len(fault.message) < 400


@pytest.mark.parametrize("written", ["16.0", "1.6e1", "16"])
def test_an_integer_may_be_written_with_a_point(written):
    body = f'{{"prompt": "x", "max_tokens": {written}, "stop_token_ids": [1.0, 2], "temperature": 1}}'.encode()
    request = decode_completion(body)
    assert (request.max_tokens, request.stop_token_ids, request.temperature) == (16, [1, 2], 1.0)
    assert isinstance(request.max_tokens, int)


@pytest.mark.parametrize("written", ["16.5", '"16"', "true"])
def test_what_is_no_integer_is_none_with_a_point_either(written):
    with pytest.raises(TokenloomError) as caught:
        decode_completion(f'{{"prompt": "x", "max_tokens": {written}}}'.encode())
    assert caught.value.param == "max_tokens"


def test_a_body_with_more_arrays_and_objects_than_are_taken_is_refused_before_they_are_made():
    body = b'{"messages": [' + b"[]," * MAX_CONTAINERS + b"broken"
    with pytest.raises(TokenloomError) as caught:
        decode_chat(body)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, None)
    assert str(MAX_CONTAINERS) in caught.value.message


async def test_a_long_body_is_read_beside_the_loop_and_a_short_one_on_it():
    here = threading.get_ident()
    assert await read_body(bytearray(1000), threading.get_ident) == here
    assert await read_body(bytearray(1_000_000), threading.get_ident) != here


def test_a_field_that_is_no_prompt_is_bounded_and_a_prompt_is_not():
    long = "x" * MAX_FIELD_BYTES
    for field in ("metadata", "tools", "guided_json", "anything"):
        with pytest.raises(TokenloomError) as caught:
            decode_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], field: {"a": long}}))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, field)
    assert decode_chat(msgspec.json.encode({"messages": [{"role": "user", "content": long}]})).messages[0].content == long
    assert decode_completion(msgspec.json.encode({"prompt": long})).prompt == long
