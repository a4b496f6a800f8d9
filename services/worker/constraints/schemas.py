"""JSON schemas before a backend sees them: what no backend should be trusted with is refused here, with the place in the schema.

Checked: the JSON itself, nesting and size, bounds, references (only within the schema, and to what is there), and that some finite value
satisfies the schema: an object that requires itself compiles well and never ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from libs.errors import TokenloomError
from services.worker.constraints.base import refused
from services.worker.constraints.expressions import RuleSet, check
from services.worker.constraints.keywords import check_form, check_kept, without_noise
from services.worker.constraints.numbers import check_bounds
from services.worker.constraints.regexes import read_search

MAX_DEPTH = 64
MAX_NODES = 20_000
# Most that minItems, maxLength and their like may ask for.
MAX_BOUND = 65_536

# A schema as JSON has it: an object, or true or false.
Schema = dict[str, Any] | bool

BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains")
# Keywords by what they hold.
_ONE_SCHEMA = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def read_schema(text: str) -> dict[str, Any]:
    """The schema of a text, checked. Raises TokenloomError(INVALID_CONSTRAINT)."""
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except TokenloomError:
        raise
    except ValueError as error:
        raise refused(f"the schema is no JSON: {error}") from error
    except RecursionError as error:
        raise refused("the schema is nested too deeply") from error
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused("the schema holds half a surrogate pair") from error
    return check_schema(schema)


def _no_number(name: str) -> Any:
    raise refused(f"the schema is no JSON: {name} is no number")


def _finite(digits: str) -> float:
    if float(digits) in (float("inf"), float("-inf")):
        raise refused(f"the schema holds {digits[:40]}, which is beyond every 64-bit float")
    return float(digits)


def check_schema(schema: Any) -> dict[str, Any]:
    """A schema that may be compiled, without keywords that say nothing: `true` becomes {}. Raises TokenloomError(INVALID_CONSTRAINT)."""
    if schema is True:
        return {}
    if schema is False:
        raise refused("the schema is false: nothing satisfies it")
    if not isinstance(schema, dict):
        raise refused(f"a schema is an object, not {_kind(schema)}")
    for place, node in _walk(schema):
        if isinstance(node, dict):
            _check_node(schema, place, node)
    kept = rewritten(schema, lambda _, node: without_noise(node))
    nodes = dict(_walk(kept))
    for place, node in nodes.items():
        if isinstance(node, dict):
            check_kept(place, node)
            if "$ref" in node:
                target(kept, place, node["$ref"])
    _check_ends(kept, nodes)
    return kept


def rewritten(
    schema: dict[str, Any], change: Callable[[str, dict[str, Any]], dict[str, Any]], keys: Callable[[str], str] = str
) -> dict[str, Any]:
    """A checked schema with what `change` makes of each object of a schema in it, the innermost first; it is told the place.

    `keys` spells the patterns of `patternProperties` anew.
    """

    def visit(place: str, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        changed = dict(node)
        for keyword in _ONE_SCHEMA:
            if keyword in node:
                value = node[keyword]
                changed[keyword] = items(f"{place}/{keyword}", value) if isinstance(value, list) else visit(f"{place}/{keyword}", value)
        for keyword in _LISTS:
            if keyword in node:
                changed[keyword] = items(f"{place}/{keyword}", node[keyword])
        for keyword in _MAPPINGS:
            if keyword in node:
                spell = keys if keyword == "patternProperties" else str
                changed[keyword] = {spell(name): visit(f"{place}/{keyword}/{_escaped(name)}", item) for name, item in node[keyword].items()}
        return change(place, changed)

    def items(place: str, nodes: list[Any]) -> list[Any]:
        return [visit(f"{place}/{index}", node) for index, node in enumerate(nodes)]

    result: dict[str, Any] = visit("#", schema)
    return result


def _walk(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """All schemas within one, by place ("#/properties/a"). Raises for what is no schema, too deep or too many."""
    stack: list[tuple[str, Any, int]] = [("#", schema, 0)]
    count = 0
    while stack:
        place, node, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise refused(f"the schema is nested more than {MAX_DEPTH} deep")
        if count > MAX_NODES:
            raise refused(f"the schema has more than {MAX_NODES} parts")
        if not isinstance(node, dict | bool):
            raise refused(f"{place}: a schema is an object or a truth value, not {_kind(node)}")
        yield place, node
        if isinstance(node, dict):
            stack.extend((f"{place}/{step}", inner, depth + 1) for step, inner in _inner(place, node))


def _inner(place: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _ONE_SCHEMA:
        value = node.get(keyword, True)
        if keyword == "items" and isinstance(value, list):
            yield from ((f"items/{index}", item) for index, item in enumerate(value))
        elif keyword in node:
            yield keyword, value
    for keyword in _LISTS:
        if keyword in node:
            if not isinstance(node[keyword], list):
                raise refused(f"{place}/{keyword} is a list of schemas, not {_kind(node[keyword])}")
            yield from ((f"{keyword}/{index}", item) for index, item in enumerate(node[keyword]))
    for keyword in _MAPPINGS:
        if keyword in node:
            if not isinstance(node[keyword], dict):
                raise refused(f"{place}/{keyword} is an object of schemas, not {_kind(node[keyword])}")
            yield from ((f"{keyword}/{_escaped(name)}", item) for name, item in node[keyword].items())


def _check_node(root: dict[str, Any], place: str, node: dict[str, Any]) -> None:
    for keyword in BOUNDS:
        value = node.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise refused(f"{place}/{keyword} is a number from 0 on, not {json.dumps(value)[:40]}")
        if value > MAX_BOUND:
            raise refused(f"{place}/{keyword} asks for {value}; at most {MAX_BOUND} are taken")
    check_form(place, node)
    check_bounds(place, node)
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused(f"{place}/required is a list of names")
    for keyword in ("pattern", "format", "$ref"):
        if not isinstance(node.get(keyword, ""), str):
            raise refused(f"{place}/{keyword} is a text, not {_kind(node[keyword])}")
    if "pattern" in node:
        _check_pattern(f"{place}/pattern", node["pattern"])
    for pattern in node.get("patternProperties", {}):
        _check_pattern(f"{place}/patternProperties", pattern)
    if "$ref" in node:
        target(root, place, node["$ref"])


def _check_pattern(place: str, pattern: str) -> None:
    try:
        check(RuleSet({"root": read_search(pattern)}))
    except Exception as error:
        raise refused(f"{place}: {error}") from error


def target(root: dict[str, Any], place: str, reference: str) -> Schema:
    """The schema that a reference names. Raises TokenloomError(INVALID_CONSTRAINT)."""
    if not reference.startswith("#"):
        raise refused(f"{place}/$ref: {reference[:80]!r} lies outside the schema; only references within it (#/$defs/...) are taken")
    node: Any = root
    if reference not in ("#", "#/"):
        if not reference.startswith("#/"):
            raise refused(f"{place}/$ref: {reference[:80]!r} is an anchor; only paths (#/$defs/...) are taken")
        for step in reference[2:].split("/"):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise refused(f"{place}/$ref: {reference[:80]!r} names nothing in the schema")
    if not isinstance(node, dict | bool):
        raise refused(f"{place}/$ref: {reference[:80]!r} names no schema")
    found: Schema = node
    return found


def _check_ends(root: dict[str, Any], nodes: dict[str, Schema]) -> None:
    """Refuses a schema that no finite value satisfies: the least fixed point over all schemas in it."""
    finite: set[int] = set()
    waiting = [node for node in nodes.values() if isinstance(node, dict)]
    while True:
        ended = [node for node in waiting if _ends(root, node, finite)]
        if not ended:
            break
        finite.update(map(id, ended))
        waiting = [node for node in waiting if id(node) not in finite]
    if id(root) not in finite:
        place = max((place for place, node in nodes.items() if isinstance(node, dict) and id(node) not in finite), key=len)
        raise refused(f"no finite value satisfies the schema: {place} needs itself")


def _ends(root: dict[str, Any], node: Any, finite: set[int]) -> bool:
    """Whether a finite value is known for a schema, given the schemas that have one."""

    def known(inner: Any) -> bool:
        return not isinstance(inner, dict) or id(inner) in finite

    if "$ref" in node and not known(target(root, "", node["$ref"])):
        return False
    if not all(map(known, node.get("allOf", ()))):
        return False
    if any(node.get(keyword) and not any(map(known, node[keyword])) for keyword in ("anyOf", "oneOf")):
        return False
    if "enum" in node or "const" in node:
        return True
    types = node.get("type", ())
    match [types] if isinstance(types, str) else list(types):
        case ["object"]:
            named = node.get("properties", {})
            others = node.get("additionalProperties", True)
            return all(known(named.get(name, others)) for name in node.get("required", ()))
        case ["array"]:
            first = node.get("prefixItems", ())
            least = int(node.get("minItems", 0))
            rest = node.get("items", True)
            return all(map(known, first[:least])) and (least <= len(first) or isinstance(rest, list) or known(rest))
        case _:
            return True


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
