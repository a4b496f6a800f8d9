"""JSON schemas of tools: what their arguments must be, and the same schema at another place."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool

MAX_SCHEMA_DEPTH = 64

# Keywords whose values are no schemas but data, in which "$ref" is a key like any other.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
# Keywords whose values are objects of schemas under names of the client's.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# They say where a schema is or what dialect it is in; below another schema they would move what its references refer to.
_OF_DOCUMENTS = frozenset({"$id", "$schema", "id"})


def arguments_schema(parameters: Schema | None, *, strict: bool = False) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object whatever the tool says of them.

    None and False: a tool without parameters, {}. True and an empty schema: any object. `strict`: objects whose properties are listed have
    no others, at any depth, where the schema does not say whether they may.
    """
    if parameters is None or parameters is False:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {} if parameters is True else {name: value for name, value in parameters.items() if name not in _OF_DOCUMENTS}
    schema = {**schema, "type": "object"}
    return _closed(schema) if strict else schema


def moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema with its references into itself (#, #/...) as they are when it stands at `place` (#/... of another document)."""
    return {name: value if name in _DATA else _moved(name, value, place) for name, value in schema.items()}


def depth_of(value: Any, limit: int) -> int:
    """How deep objects and arrays are nested; more than `limit` is not looked into."""
    depth, level = 0, [value]
    while depth <= limit and (level := [item for item in level if isinstance(item, dict | list)]):
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _moved(name: str, value: Any, place: str) -> Any:
    if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
        return place + value[1:] if value == "#" or value.startswith("#/") else value
    if name in _NAMED and isinstance(value, dict):
        return {key: _child_moved(child, place) for key, child in value.items()}
    return _child_moved(value, place)


def _child_moved(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_child_moved(item, place) for item in value]
    return moved(value, place) if isinstance(value, dict) else value


def _closed(schema: Any) -> Any:
    """Objects with listed properties closed. What is within allOf stays open: each part of it would refuse the properties of the others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for name, value in schema.items():
        if name in _DATA or name == "allOf":
            closed[name] = value
        elif name in _NAMED and isinstance(value, dict):
            closed[name] = {key: _closed(child) for key, child in value.items()}
        else:
            closed[name] = _closed(value)
    if "properties" in closed and not {"additionalProperties", "allOf", "$ref"} & closed.keys():
        closed["additionalProperties"] = False
    return closed
