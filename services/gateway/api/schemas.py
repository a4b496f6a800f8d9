"""JSON schemas of the bodies, made from the types that read and write them (JSON Schema 2020-12, as OpenAPI 3.1 has it)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from libs.errors import ErrorCode
from services.gateway.api.parameters import PARAMETERS, Parameter
from services.gateway.api.responses import ChatChoice, ChatChunkChoice, CompletionChoice, ErrorDetail

Schema = dict[str, Any]
PREFIX = "#/components/schemas/"
_ENDS = ["stop", "length"]
# What the types of responses leave open. finish_reason: null while a choice goes on.
_VALUES: Mapping[type[Struct], Mapping[str, list[Any]]] = {
    ChatChoice: {"finish_reason": [*_ENDS, "tool_calls"]},
    ChatChunkChoice: {"finish_reason": [*_ENDS, "tool_calls", None]},
    CompletionChoice: {"finish_reason": [*_ENDS, None]},
    ErrorDetail: {"code": sorted({code.spec.label for code in ErrorCode})},
}
# A keyword of a Parameter -> the type that it is about.
_KEYWORDS = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), ("number", "integer")),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("maxProperties", "propertyNames", "additionalProperties"), ("object",)),
}


def ref(kind: type[Struct]) -> Schema:
    """The reference to a type among the components."""
    return {"$ref": f"{PREFIX}{kind.__name__}"}


def components(requests: Sequence[type[Struct]], responses: Sequence[type[Struct]]) -> dict[str, Schema]:
    """The schemas of these types and of all within them, by name. A field of a request that may be absent may be null. The fields of a
    response are all there, but for those that depend on the request.
    """
    _, made = msgspec.json.schema_components({*requests, *responses}, ref_template=f"{PREFIX}{{name}}")
    names = {full: _name(full) for full in made}
    found: dict[str, Schema] = {name: _renamed(made[full], names) for full, name in names.items()}
    for kind in _structs_within(responses):
        _complete(found[kind.__name__], kind)
    for name, parameters in PARAMETERS.items():
        for field, parameter in parameters.items():
            found[name]["properties"][field] = _described(found[name]["properties"][field], parameter)
    return {name: found[name] for name in sorted(found)}


def _name(full: str) -> str:
    """Two types of one name have their module before it: the one of requests becomes what OpenAI's clients call a parameter."""
    module, _, name = full.rpartition(".")
    return f"{name}Param" if module.endswith(".requests") else name


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """References to the components' names; absent and null are the same to a request, so that `default: null` says nothing."""
    if isinstance(schema, list):
        return [_renamed(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _renamed(value, names) for key, value in schema.items() if (key, value) != ("default", None)}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = PREFIX + names[found["$ref"].removeprefix(PREFIX)]
    return found


def _structs_within(kinds: Iterable[type[Struct]]) -> set[type[Struct]]:
    """The types and all structs that are reached through their fields."""
    found: set[type[Struct]] = set()
    for info in msgspec.inspect.multi_type_info(kinds):
        _gather(info, found)
    return found


def _gather(info: msgspec.inspect.Type, found: set[type[Struct]]) -> None:
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls not in found:
            found.add(info.cls)
            for field in info.fields:
                _gather(field.type, found)
    elif isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            _gather(member, found)
    elif isinstance(info, msgspec.inspect.ListType):
        _gather(info.item_type, found)
    elif isinstance(info, msgspec.inspect.DictType):
        _gather(info.value_type, found)


def _complete(schema: Schema, kind: type[Struct]) -> None:
    """What is always written is required, and a constant says which it is."""
    fields = msgspec.structs.fields(kind)
    required = [field.encode_name for field in fields if field.default is not UNSET]
    if required:
        schema["required"] = required
    for field in fields:
        told = schema["properties"][field.encode_name]
        if isinstance(told.get("default"), str):
            told["const"] = told.pop("default")
        told.pop("default", None)
    for name, values in _VALUES.get(kind, {}).items():
        schema["properties"][name] = {"enum": values}


def _described(schema: Schema, parameter: Parameter) -> Schema:
    """A field's schema with what is known of its values, each keyword beside the type that it is about."""
    bounds = dict(parameter.bounds)
    branches = [dict(branch) for branch in schema.get("anyOf", [schema])]
    for branch in branches:
        kind = branch.get("type")
        branch.update({word: bounds[word] for word in bounds if kind in _KEYWORDS.get(word, ())})
        if kind == "array" and parameter.items:
            branch["items"] = {**branch["items"], **parameter.items}
    everywhere = {word: value for word, value in bounds.items() if word not in _KEYWORDS}
    joined = {"anyOf": branches} if "anyOf" in schema else branches[0]
    return {**joined, "description": parameter.text, **everywhere}
