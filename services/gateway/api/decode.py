"""From a body to a typed request: malformed JSON, wrong types, unknown fields and features that are not built each get their own answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.gateway.api.fields import NO_EFFECT, REFUSED, REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS, RENAMED, Neutral
from services.gateway.api.requests import ChatRequest, CompletionRequest
from services.gateway.parsers.schemas import depth_of

# Levels of arrays and objects in a body. More would take what reads and writes them, here and in the tokenizers, to the end of its stack.
MAX_NESTING = 256
# Arrays and objects in a body: counted by their brackets, which may stand in texts too. What reads a body makes an object of each.
MAX_CONTAINERS = 1 << 18
# Bytes of the JSON of a field that is neither a prompt nor what belongs into one.
MAX_FIELD_BYTES = 4 * 1024 * 1024
_LONG_FIELDS = frozenset({"messages", "prompt", "tokens", "documents"})
# At most so many unknown names, of so many characters, go into a log line: a client chooses them.
_MAX_NAMES, _MAX_NAME, _MAX_SENTENCE = 20, 64, 256
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")

_log = get_logger("gateway.api")
RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """The chat request in `body`. Raises TokenloomError MALFORMED_JSON, INVALID_REQUEST or UNSUPPORTED with the parameter at fault."""
    return _decode(body, ChatRequest, REFUSED_IN_CHATS)


def decode_completion(body: bytes | bytearray) -> CompletionRequest:
    """The completion request in `body`. Raises as decode_chat does."""
    return _decode(body, CompletionRequest, REFUSED_IN_COMPLETIONS)


def decode_body(body: bytes | bytearray, kind: type[RequestT]) -> RequestT:
    """The request of another kind in `body`. Raises as decode_chat does."""
    return _decode(body, kind, {})


def _decode(body: bytes | bytearray, kind: type[RequestT], refused_too: Mapping[str, Neutral]) -> RequestT:
    raw = _json_object(body)
    unknown = []
    for name, value in raw.items():
        neutral = REFUSED.get(name) or refused_too.get(name)
        if neutral is not None:
            if value is not None and not neutral(value):
                raise TokenloomError(ErrorCode.UNSUPPORTED, f"{name} is not supported by this server yet", param=name)
        elif name in RENAMED and value is not None:
            _warn_renamed(name)
        elif name not in kind.__struct_fields__ and name not in NO_EFFECT:
            unknown.append(name[:_MAX_NAME])
    if unknown:
        _log.warning("unknown fields of a request are ignored", fields=unknown[:_MAX_NAMES], count=len(unknown))
    _make_whole(raw, kind)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _make_whole(raw: dict[str, Any], kind: type) -> None:
    """16.0 is 16 where an integer is meant, as JSON Schema has it: not every client's language knows both kinds of numbers."""
    for name in _integers(kind) & raw.keys():
        value = raw[name]
        if isinstance(value, float) and value.is_integer():
            raw[name] = int(value)
        elif isinstance(value, list):
            raw[name] = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]


@functools.cache
def _integers(kind: type) -> frozenset[str]:
    """The fields that hold integers, or lists of them, and no other numbers."""
    found = set()
    for item in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        types = list(item.type.types) if isinstance(item.type, inspect.UnionType) else [item.type]
        types += [one.item_type for one in types if isinstance(one, inspect.ListType)]
        if any(isinstance(one, inspect.IntType) for one in types) and not any(isinstance(one, inspect.FloatType) for one in types):
            found.add(item.encode_name)
    return frozenset(found)


@functools.cache
def _warn_renamed(name: str) -> None:
    """Once in the life of the process: clients repeat themselves."""
    _log.warning("a client uses a parameter's old name", old=name, new=RENAMED[name])


def _json_object(body: bytes | bytearray) -> dict[str, Any]:
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"The request body has {containers} brackets; at most {MAX_CONTAINERS} are taken")
    if len(body) > MAX_FIELD_BYTES:
        _check_sizes(body)
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise _unacceptable(body, _sentence(str(error))) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise TokenloomError(ErrorCode.MALFORMED_JSON, f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if containers > MAX_NESTING and depth_of(raw, MAX_NESTING) > MAX_NESTING:
        raise _too_deep()
    if not isinstance(raw, dict):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"The request body must be a JSON object, not {_json_name(raw)}")
    return raw


def _check_sizes(body: bytes | bytearray) -> None:
    """Raises TokenloomError INVALID_REQUEST for a field that is too long, before anything is made of it."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):  # reading it whole says what is wrong
        return
    for name, value in fields.items():
        size = memoryview(value).nbytes
        if size > MAX_FIELD_BYTES and name not in _LONG_FIELDS:
            shown = name[:_MAX_NAME]
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{shown}: {size} bytes exceed the limit of {MAX_FIELD_BYTES}", param=shown)


def _unacceptable(body: bytes | bytearray, problem: str) -> TokenloomError:
    """A value that JSON can write and no type can hold (1e400), under the name of the field it is in; unless more is wrong behind it."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # no object at all
        fields = {}
    except msgspec.DecodeError as error:
        return TokenloomError(ErrorCode.MALFORMED_JSON, f"The request body is not valid JSON: {error}")
    except RecursionError:
        return _too_deep()
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            shown = name[:_MAX_NAME]
            return TokenloomError(ErrorCode.INVALID_REQUEST, f"{shown}: {problem}", param=shown)
    return TokenloomError(ErrorCode.INVALID_REQUEST, f"The request body is not acceptable: {problem}")


def _too_deep() -> TokenloomError:
    return TokenloomError(ErrorCode.MALFORMED_JSON, f"The request body is nested more than {MAX_NESTING} levels deep")


def _invalid(problem: str) -> TokenloomError:
    path = _PATH.search(problem)
    param = path[1] if path else ""
    missing = _MISSING.search(problem)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return TokenloomError(ErrorCode.INVALID_REQUEST, f"{param} is required", param=param)
    # msgspec writes `[...]` for the values of an object whose keys are the client's.
    param = param.replace("[...]", "")
    return TokenloomError(ErrorCode.INVALID_REQUEST, f"{param or 'request body'}: {_sentence(problem)}", param=param or None)


def _sentence(problem: str) -> str:
    text = _PATH.sub("", problem).replace("`", "")
    cut = text if len(text) <= _MAX_SENTENCE else f"{text[:_MAX_SENTENCE]}..."  # it may quote what the client sent, of any length
    return cut[:1].lower() + cut[1:]


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
