"""Keywords of JSON Schema one by one: what says nothing is taken out, and what no backend keeps to is refused with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.constraints.base import refused

FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "uuid", "uri", "hostname", "ipv4", "ipv6"))
# Formats of JSON Schema's own that say how a text is written and that no backend keeps to. All others are annotations, as JSON Schema has
# it (pydantic's `path`, `binary`, `password` say what a text means).
_UNKEPT = frozenset(
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex")
)
_NO_BACKEND = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
TYPES = frozenset(("string", "integer", "number", "array", "object", "boolean", "null"))
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains")
_ALWAYS: tuple[Any, ...] = (True, {})


def without_noise(node: dict[str, Any]) -> dict[str, Any]:
    """One checked schema without the keywords that every value satisfies anyway; 3.0 items are 3."""
    kept = {keyword: value for keyword, value in node.items() if keyword not in _NOISE or not _NOISE[keyword](node)}
    return {**kept, **{keyword: int(kept[keyword]) for keyword in _COUNTS if keyword in kept}}


def check_form(place: str, node: dict[str, Any]) -> None:
    """Refuses types, alternatives and values that are none. Raises TokenloomError(INVALID_CONSTRAINT)."""
    if "type" in node:
        names = node["type"] if isinstance(node["type"], list) else [node["type"]]
        unknown = [name for name in names if not isinstance(name, str) or name not in TYPES]
        if unknown or not names:
            raise refused(f"{place}/type: {str(unknown[0])[:40] if unknown else 'an empty list'} is no type")
    if not isinstance(node.get("enum", []), list):
        raise refused(f"{place}/enum is a list of values")
    for keyword in ("enum", "anyOf", "oneOf"):
        if node.get(keyword) == []:
            raise refused(f"{place}/{keyword} is empty: nothing satisfies it")


def check_kept(place: str, node: dict[str, Any]) -> None:
    """Refuses what neither backend keeps to. Raises TokenloomError(INVALID_CONSTRAINT)."""
    beyond = next((keyword for keyword in _NO_BACKEND if keyword in node), None)
    if beyond is not None:
        raise refused(f"{place}/{beyond}: no backend keeps to {beyond}")
    if node.get("format") in _UNKEPT and _may_be(node, "string"):
        raise refused(f"{place}/format: no backend keeps to {node['format']!r}; {', '.join(sorted(FORMATS))} are kept to")
    for least, most in (("minItems", "maxItems"), ("minLength", "maxLength"), ("minProperties", "maxProperties")):
        if node.get(least, 0) > node.get(most, node.get(least, 0)):
            raise refused(f"{place}: nothing satisfies {least} {node[least]} and {most} {node[most]}")
    counted = next((keyword for keyword in ("minProperties", "maxProperties") if keyword in node), None)
    if counted and set(node.get("properties", {})) - set(node.get("required", ())) and _may_be(node, "object"):
        raise refused(f"{place}/{counted}: no backend counts properties where some that are named may be left out")
    if node.get("minProperties", 0) > 1 and _may_be(node, "object"):
        raise refused(
            f"{place}/minProperties: more than 1 is kept to only where so many properties are required by name, "
            "since the same one could be written twice"
        )


def _may_be(node: dict[str, Any], name: str) -> bool:
    return name in (node["type"] if isinstance(node.get("type"), list) else [node.get("type", name)])


def _holds_no_rest(node: dict[str, Any]) -> bool:
    """Whether `additionalItems` is about nothing: it follows a list of schemas."""
    return not isinstance(node.get("items"), list) or node["additionalItems"] in _ALWAYS


def _is_satisfied(node: dict[str, Any], keyword: str) -> bool:
    """Whether what is to be there beside a property is there anyway."""
    always = set(node.get("required", ()))
    asked = node[keyword]
    return isinstance(asked, dict) and all(
        others in _ALWAYS if isinstance(others, dict | bool) else isinstance(others, list) and {str(name) for name in others} <= always
        for others in asked.values()
    )


def _is_never_full(node: dict[str, Any]) -> bool:
    """Whether no object can have more than `maxProperties`."""
    closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
    return closed and len(node.get("properties", {})) <= node["maxProperties"]


def _asks_for_nothing(node: dict[str, Any]) -> bool:
    """Whether `contains` is satisfied by no items."""
    return "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node)


# Keywords by whether they say nothing in a schema that has them.
_NOISE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "uniqueItems": lambda node: node["uniqueItems"] is False or int(node.get("maxItems", 2)) <= 1,
    "contains": _asks_for_nothing,
    "minContains": _asks_for_nothing,
    "maxContains": lambda node: "contains" not in node,
    "if": lambda node: all(node.get(keyword, True) in _ALWAYS for keyword in ("then", "else")),
    "then": lambda node: "if" not in node or node["then"] in _ALWAYS,
    "else": lambda node: "if" not in node or node["else"] in _ALWAYS,
    "not": lambda node: node["not"] is False,
    "propertyNames": lambda node: node["propertyNames"] in _ALWAYS,
    "unevaluatedItems": lambda node: node["unevaluatedItems"] in _ALWAYS,
    "unevaluatedProperties": lambda node: node["unevaluatedProperties"] in _ALWAYS,
    "additionalItems": _holds_no_rest,
    "dependentRequired": lambda node: _is_satisfied(node, "dependentRequired"),
    "dependentSchemas": lambda node: _is_satisfied(node, "dependentSchemas"),
    "dependencies": lambda node: _is_satisfied(node, "dependencies"),
    "minItems": lambda node: node["minItems"] == 0,
    "minLength": lambda node: node["minLength"] == 0,
    "minProperties": lambda node: node["minProperties"] <= len(set(node.get("required", ()))),
    "maxProperties": _is_never_full,
    "format": lambda node: node["format"] not in FORMATS | _UNKEPT,
    "multipleOf": lambda node: node["multipleOf"] == 1 and node.get("type") == "integer",
}
