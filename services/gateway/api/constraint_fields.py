"""What an output must keep to, in all the shapes that OpenAI's and vLLM's clients write it.

Here only what is cheap is checked: shapes, sizes, that there is one constraint and no other. Whether a schema, an expression or a grammar
can be served the worker says, which compiles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.checks import invalid, unsupported
from services.gateway.api.requests import GenerationRequest, ResponseFormat, StructuredOutputs
from services.gateway.parsers.schemas import closed_objects

# Bytes of UTF-8 of all texts of a constraint, levels of a schema's JSON, and alternatives to choose from.
MAX_CONSTRAINT_BYTES = 256 * 1024
MAX_DEPTH = 100
MAX_CHOICES = 4096
_SPACED = (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT, ConstraintKind.STRUCTURAL_TAG)
# What vLLM's older guided_decoding_backend could say behind a colon.
_NO_SPACE = "disable-any-whitespace"
_BACKEND_OPTIONS = frozenset({"no-fallback", _NO_SPACE})


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """The constraint that a body asks for, or None.

    Raises TokenloomError: INVALID_CONSTRAINT for a text that can be none or is too long, INVALID_REQUEST for two that contradict each
    other, UNSUPPORTED for options that are not served; each names the field.
    """
    found = list(_all_of(request))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise invalid(f"{second} contradicts {first}: an output keeps to one constraint", second)
    if not found:
        return None
    if size_of(found[0]) > MAX_CONSTRAINT_BYTES:
        raise _too_big(found[0].param)
    return found[0]


def size_of(constraint: Constraint) -> int:
    """Bytes of its texts."""
    return sum(len(text.encode()) for text in constraint.texts)


def backend_of(request: GenerationRequest) -> str | None:
    """The backend that a client asks to have its constraint compiled by; None for whichever there is. Raises TokenloomError."""
    if request.guided_decoding_backend is None:
        return None
    name, *options = request.guided_decoding_backend.replace(":", ",").split(",")
    for option in options:
        if option not in _BACKEND_OPTIONS:
            raise unsupported(f"guided_decoding_backend: the option {option[:64]!r} is not supported", "guided_decoding_backend")
    # vLLM called llguidance by this name.
    return {"auto": None, "guidance": "llguidance"}.get(name, name)


def _all_of(request: GenerationRequest) -> Iterator[Constraint]:
    compact = _NO_SPACE in (request.guided_decoding_backend or "")
    if request.response_format is not None:
        yield from _response_format(request.response_format, compact)
    if request.structured_outputs is not None:
        yield _structured(request.structured_outputs, compact)
    if request.guided_json is not None:
        yield _schema(request.guided_json, "guided_json", compact)
    if request.guided_regex is not None:
        yield _text(ConstraintKind.REGEX, request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        yield _choice(request.guided_choice, "guided_choice")
    if request.guided_grammar is not None:
        yield _text(ConstraintKind.GRAMMAR, request.guided_grammar, "guided_grammar")
    if request.structural_tag is not None:
        yield _structural_tag(request.structural_tag, "structural_tag", compact)


def _response_format(wanted: ResponseFormat, compact: bool) -> Iterator[Constraint]:
    if wanted.type == "json_object":
        yield Constraint(ConstraintKind.JSON_OBJECT, compact=compact, param="response_format")
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid("response_format.json_schema is required where the type is json_schema", "response_format.json_schema")
        name = "response_format.json_schema.schema"
        if wanted.json_schema.definition is None:
            raise invalid(f"{name} is required", name)
        yield _schema(wanted.json_schema.definition, name, compact, closed=wanted.json_schema.strict is not False)
    elif wanted.type == "structural_tag":
        parts = {"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}
        tag = {"type": wanted.type, **{name: part for name, part in parts.items() if part is not None}}
        yield _structural_tag(tag, "response_format", compact)


def _structured(wanted: StructuredOutputs, compact: bool) -> Constraint:
    if wanted.whitespace_pattern is not None:
        message = "structured_outputs.whitespace_pattern is not supported: white space between JSON tokens is bounded, or none"
        raise unsupported(message, "structured_outputs.whitespace_pattern")
    found = list(_kinds(wanted, compact or wanted.disable_any_whitespace is True))
    if len(found) != 1:
        names = "json, regex, choice, grammar, json_object and structural_tag"
        raise invalid(f"structured_outputs must have exactly one of {names}; got {len(found)}", "structured_outputs")
    if wanted.disable_any_whitespace and found[0].kind not in _SPACED:
        name = "structured_outputs.disable_any_whitespace"
        raise invalid(f"{name} is about JSON; {found[0].param} is none", name)
    return found[0]


def _kinds(wanted: StructuredOutputs, compact: bool) -> Iterator[Constraint]:
    if wanted.json is not None:
        closed = wanted.disable_additional_properties is not False
        yield _schema(wanted.json, "structured_outputs.json", compact, closed=closed)
    if wanted.regex is not None:
        yield _text(ConstraintKind.REGEX, wanted.regex, "structured_outputs.regex")
    if wanted.choice is not None:
        yield _choice(wanted.choice, "structured_outputs.choice")
    if wanted.grammar is not None:
        yield _text(ConstraintKind.GRAMMAR, wanted.grammar, "structured_outputs.grammar")
    if wanted.json_object:
        yield Constraint(ConstraintKind.JSON_OBJECT, compact=compact, param="structured_outputs.json_object")
    if wanted.structural_tag is not None:
        yield _structural_tag(wanted.structural_tag, "structured_outputs.structural_tag", compact)


def _schema(schema: str | dict[str, Any] | bool, param: str, compact: bool, *, closed: bool = True) -> Constraint:
    value = _parsed(schema, param) if isinstance(schema, str) else schema
    if not isinstance(value, dict | bool):
        raise _bad(f"{param} must be a JSON schema: an object, or true or false", param)
    text = _written(value, param)
    if closed:
        text = msgspec.json.encode(closed_objects(value)).decode()
    return Constraint(ConstraintKind.JSON_SCHEMA, (text,), compact=compact, param=param)


def _structural_tag(tag: str | dict[str, Any], param: str, compact: bool) -> Constraint:
    value = _parsed(tag, param) if isinstance(tag, str) else tag
    if not isinstance(value, dict):
        raise _bad(f"{param} must be a structural tag: a JSON object", param)
    if ("format" in value) == ("structures" in value or "triggers" in value):
        raise _bad(f"{param} must have either format, or structures and triggers", param)
    if "format" not in value and not ("structures" in value and "triggers" in value):
        raise _bad(f"{param} must have both structures and triggers", param)
    return Constraint(ConstraintKind.STRUCTURAL_TAG, (_written(value, param),), compact=compact, param=param)


def _text(kind: ConstraintKind, text: str, param: str) -> Constraint:
    if not text.strip():
        raise _bad(f"{param} must not be empty", param)
    return Constraint(kind, (text,), param=param)


def _choice(choices: list[str], param: str) -> Constraint:
    if not choices:
        raise _bad(f"{param} must not be empty", param)
    if len(choices) > MAX_CHOICES:
        raise _bad(f"{param}: {len(choices)} texts exceed the limit of {MAX_CHOICES}", param)
    if "" in choices:
        name = f"{param}[{choices.index('')}]"
        raise _bad(f"{name} must not be empty", name)
    return Constraint(ConstraintKind.CHOICE, tuple(dict.fromkeys(choices)), param=param)


def _parsed(text: str, param: str) -> Any:
    if len(text) > MAX_CONSTRAINT_BYTES:
        raise _too_big(param)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _bad(f"{param} is no valid JSON: {error}", param) from None
    except RecursionError:
        raise _bad(f"{param} is nested too deeply", param) from None


def _written(value: Any, param: str) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # a schema that came as text may have just as many levels as reading takes, and writing takes more
        raise _bad(f"{param} is nested too deeply", param) from None
    if len(text) > MAX_CONSTRAINT_BYTES:  # before it is walked through
        raise _too_big(param)
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return text
    raise _bad(f"{param} is nested more than {MAX_DEPTH} levels deep", param)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _too_big(param: str) -> TokenloomError:
    return _bad(f"{param} exceeds the limit of {MAX_CONSTRAINT_BYTES} bytes", param)


def _bad(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_CONSTRAINT, message, param=param)
