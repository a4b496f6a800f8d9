"""JSON schemas of tools: what their arguments must be, and the same schema at another place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any] | bool

MAX_SCHEMA_DEPTH = 64

# Keywords whose values are no schemas but data, in which "$ref" is a key like any other.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
# Keywords whose values are objects of schemas under names of the client's.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords whose values are lists of schemas.
_LISTED = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_SHOWN = 32
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
# Where a schema keeps its definitions, and what stands between its name and theirs.
DEFINITION_MARKS = {"$defs": ".", "definitions": ":"}
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
    if not _refers_to_object(schema):
        schema = {**schema, "type": "object"}
    return closed_objects(schema) if strict else schema


def as_definitions(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema as definitions of another document, in which #/$defs/name is the schema itself.

    Its own definitions stand beside it, as `name.X` ($defs) and `name:X` (definitions): not every compiler looks into a definition for
    further ones. References into the schema (#, #/...) are made anew.
    """
    inner = {key: schema[key] for key in DEFINITION_MARKS if isinstance(schema.get(key), dict)}
    own = {key: value for key, value in schema.items() if key not in inner}
    beside = {
        f"{name}{DEFINITION_MARKS[key]}{child}": _moved(value, name) for key, found in inner.items() for child, value in found.items()
    }
    return {name: _moved(own, name), **beside}


def wrong_type(schema: Any, place: str = "") -> str:
    """Where in a schema ("/properties/a") stands a type that JSON does not have, or what is no schema where one must be; "": nowhere."""
    if not isinstance(schema, dict):
        return "" if isinstance(schema, bool) else place
    types = schema.get("type", [])
    if not all(isinstance(kind, str) and kind in _TYPES for kind in (types if isinstance(types, list) else [types])):
        return f"{place}/type"
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            # A name of any length would be copied with everything below it.
            inner = {f"{place}/{key}/{name[:_SHOWN]}": child for name, child in value.items()}
        elif key in _LISTED and isinstance(value, list):
            inner = {f"{place}/{key}/{index}": child for index, child in enumerate(value)}
        else:
            inner = {f"{place}/{key}": value} if key == "items" and isinstance(value, dict) else {}
        for at, child in inner.items():
            if wrong := wrong_type(child, at):
                return wrong
    return ""


def depth_of(value: Any, limit: int) -> int:
    """How deep objects and arrays are nested; more than `limit` is not looked into."""
    depth, level = 0, [value]
    while depth <= limit and (level := [item for item in level if isinstance(item, dict | list)]):
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _refers_to_object(schema: dict[str, Any]) -> bool:
    """Whether the schema is a reference to one of its definitions that is an object, as of a model that holds itself: not every compiler
    takes a type beside a reference.
    """
    steps = str(schema.get("$ref", "")).split("/")
    if len(steps) != 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
        return False
    found = schema.get(steps[1])
    target = found.get(steps[2]) if isinstance(found, dict) else None
    return isinstance(target, dict) and target.get("type") == "object"


def _moved(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: child if key in _DATA else _child_moved(key, child, name) for key, child in value.items()}


def _child_moved(key: str, child: Any, name: str) -> Any:
    if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(child, str):
        return _reference(child, name)
    if key in _NAMED and isinstance(child, dict):
        return {inner: _moved(schema, name) for inner, schema in child.items()}
    return _moved(child, name)


def _reference(reference: str, name: str) -> str:
    """Where a reference of the schema leads now. Anchors and other documents' addresses stay."""
    for key, mark in DEFINITION_MARKS.items():
        if reference.startswith(f"#/{key}/"):
            return f"#/$defs/{name}{mark}{reference[len(key) + 3 :]}"
    return f"#/$defs/{name}{reference[1:]}" if reference == "#" or reference.startswith("#/") else reference


# Keywords whose schemas speak of the same object as what stands beside them: closed, each would refuse the properties of the others.
_BESIDE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties"})


def closed_objects(schema: Any) -> Any:
    """Objects with listed properties closed, at any depth, where the schema does not say whether they are open.

    That is what xgrammar, vLLM's default, makes of them: a model, a small one above all, goes on inventing properties of an open object
    until it runs out of tokens. What is put together of several parts (allOf, or anyOf beside properties) stays open, definitions that it
    refers to among them.
    """
    return _closed(schema, frozenset(_references(schema)))


def _closed(schema: Any, shared: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_closed(item, shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for name, value in schema.items():
        if name in _DATA or (name in _BESIDE and _is_one_of_several(schema, name)):
            closed[name] = value
        elif name in _NAMED and isinstance(value, dict):
            closed[name] = {key: child if f"#/{name}/{key}" in shared else _closed(child, shared) for key, child in value.items()}
        else:
            closed[name] = _closed(value, shared)
    if "properties" in closed and not {"additionalProperties", "$ref", *_BESIDE} & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _is_one_of_several(schema: dict[str, Any], keyword: str) -> bool:
    """Whether what a keyword says is a part of an object whose other parts stand elsewhere."""
    parts = schema[keyword]
    return "properties" in schema or "$ref" in schema or (keyword == "allOf" and isinstance(parts, list) and len(parts) > 1)


def _references(schema: Any, *, within: bool = False) -> Iterator[str]:
    """The references from within such parts."""
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item, within=within)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str) and (within or "properties" in schema):
                yield value
            elif name not in _DATA:
                yield from _references(value, within=within or (name in _BESIDE and _is_one_of_several(schema, name)))
