"""What of JSON Schema xgrammar keeps to: the rest is refused by name, since the library would let it pass unheeded.

Strings are spelled anew: the library copies a pattern between the quotes as it stands (so that one with a quote in it ends the string), and
takes control characters where a length is given.
"""

from __future__ import annotations

from typing import Any

from services.worker.constraints.base import refused
from services.worker.constraints.expressions import (
    ANY,
    Chars,
    Choice,
    Expression,
    Ranges,
    Repeat,
    Rule,
    RuleSet,
    Sequence,
    check,
    literal,
    minus,
    normal,
)
from services.worker.constraints.numbers import is_bounded, span_of
from services.worker.constraints.regexes import read_search
from services.worker.constraints.spelling import xgrammar_regex_of

_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_REFUSED = frozenset(("oneOf", "additionalItems", "$anchor"))
_ASSERTIONS = frozenset(("$ref", "anyOf", "allOf", "enum", "const", "type")).union(*_OF_TYPE.values())
_IPV4 = r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])$"
# Beyond it the library passes over multipleOf.
_LARGEST_FACTOR = 1024
# What stands in a JSON string only escaped.
_ESCAPED: Ranges = normal([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
_SHORT = {0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r", 0x22: '\\"', 0x5C: "\\\\"}


def for_xgrammar(schema: dict[str, Any]) -> dict[str, Any]:
    """A checked schema that the library keeps to, which allows nothing that the client's does not.

    Where numbers have bounds stands a `const` of a Span.

    Raises TokenloomError(INVALID_CONSTRAINT) that names what the library cannot do and where it stands.
    """
    definitions: dict[str, Any] = {
        keyword: {name: _schema(f"#/{keyword}/{name}", inner) for name, inner in schema[keyword].items()}
        for keyword in ("$defs", "definitions")
        if keyword in schema
    }
    whole = _schema("#", schema)
    return {**whole, **definitions} if isinstance(whole, dict) else {**definitions, "anyOf": [whole]}


def _schema(place: str, node: Any) -> Any:
    """One schema and all within it."""
    if not isinstance(node, dict):
        return node
    beyond = sorted(_REFUSED & node.keys())
    if beyond:
        raise refused(f"{place}/{beyond[0]}: xgrammar does not keep to {beyond[0]}")
    asserted = {name: value for name, value in node.items() if name in _ASSERTIONS}
    for keyword, spell in (("$ref", _reference), ("allOf", _all_of), ("anyOf", _any_of), ("const", _values), ("enum", _values)):
        if keyword in asserted:
            return spell(place, asserted)
    return _typed(place, asserted)


def _alone(place: str, node: dict[str, Any], keyword: str, *others: str) -> None:
    beside = sorted(node.keys() - {keyword, *others})
    if beside:
        raise refused(f"{place}: xgrammar does not keep to {beside[0]} beside {keyword}; the backend llguidance does")


def _reference(place: str, node: dict[str, Any]) -> dict[str, Any]:
    _alone(place, node, "$ref")
    if node["$ref"] != "#" and not node["$ref"].startswith(("#/$defs/", "#/definitions/")):
        raise refused(f"{place}/$ref: xgrammar takes # and what stands in $defs or definitions, not {node['$ref'][:80]}")
    return {"$ref": node["$ref"]}


def _all_of(place: str, node: dict[str, Any]) -> Any:
    _alone(place, node, "allOf")
    if len(node["allOf"]) != 1:
        raise refused(f"{place}/allOf: xgrammar does not join several schemas; the backend llguidance does")
    return _schema(f"{place}/allOf/0", node["allOf"][0])


def _any_of(place: str, node: dict[str, Any]) -> dict[str, Any]:
    _alone(place, node, "anyOf", "type")
    if "type" in node and any(not isinstance(item, dict) or item.get("type") != node["type"] for item in node["anyOf"]):
        raise refused(f"{place}: xgrammar does not keep to type beside anyOf; the backend llguidance does")
    return {"anyOf": [_schema(f"{place}/anyOf/{index}", item) for index, item in enumerate(node["anyOf"])]}


def _values(place: str, node: dict[str, Any]) -> dict[str, Any]:
    keyword = "const" if "const" in node else "enum"
    _alone(place, node, keyword, "type")
    values = [node["const"]] if keyword == "const" else node["enum"]
    kept = [value for value in values if "type" not in node or any(_is_of(value, name) for name in _types(node))]
    if not kept:
        raise refused(f"{place}: no value of {keyword} satisfies the schema")
    return {"enum": kept}


def _is_of(value: Any, name: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "array": (list,),
        "object": (dict,),
        "boolean": (bool,),
        "null": (type(None),),
    }
    return isinstance(value, kinds[name]) and (name == "boolean") == isinstance(value, bool)


def _types(node: dict[str, Any]) -> list[str]:
    return node["type"] if isinstance(node["type"], list) else [node["type"]]


def _typed(place: str, node: dict[str, Any]) -> dict[str, Any]:
    """A schema without references and alternatives; without a type, the one type that its keywords are about."""
    if "type" in node:
        names = _types(node)
    else:
        names = [name for name, keywords in _OF_TYPE.items() if keywords & node.keys()]
        names = ["number"] if names == ["integer", "number"] else names
        if not names:
            return {}
        if len(names) > 1:
            raise refused(f"{place}: xgrammar needs a type here, since the keywords are about {' and '.join(names)}")
    spelled = [_of_type(place, name, {key: value for key, value in node.items() if key in _OF_TYPE[name]}) for name in names]
    return spelled[0] if len(spelled) == 1 else {"anyOf": spelled}


def _of_type(place: str, name: str, node: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "string":
            return _string(place, node)
        case "array":
            return _array(place, node)
        case "object":
            return _object(place, node)
        case "integer" | "number":
            factor = node.get("multipleOf", 1)
            if "multipleOf" in node and (name == "number" or factor != int(factor) or len(node) > 1):
                raise refused(f"{place}/multipleOf: xgrammar keeps to it only for integers without bounds; the backend llguidance does")
            if factor > _LARGEST_FACTOR:
                raise refused(f"{place}/multipleOf: xgrammar keeps to it only up to {_LARGEST_FACTOR}; the backend llguidance does beyond")
            if "multipleOf" in node:
                return {"type": name, "multipleOf": int(factor)}
            if is_bounded(node):
                return {"const": span_of(place, node, integers=name == "integer")}
    return {"type": name, **node}


def _string(place: str, node: dict[str, Any]) -> dict[str, Any]:
    given = [name for name in ("pattern", "format") if name in node]
    bounded = "minLength" in node or "maxLength" in node
    if len(given) + bounded > 1:
        raise refused(f"{place}: xgrammar keeps to one of pattern, format and a length, not to several; the backend llguidance does")
    if "format" in node and node["format"] != "ipv4":
        return {"type": "string", "format": node["format"]}
    if not given and not bounded:
        return {"type": "string"}
    if given:
        expression = read_search(_IPV4 if "format" in node else node["pattern"])
    else:
        expression = Repeat(Chars(ANY), int(node.get("minLength", 0)), int(node["maxLength"]) if "maxLength" in node else None)
    return {"type": "string", "pattern": _pattern(place, expression)}


def _pattern(place: str, expression: Expression) -> str:
    escaped = in_json_string(expression)
    check(RuleSet({"root": escaped}))
    return f"^{xgrammar_regex_of(escaped)}$"


def in_json_string(expression: Expression) -> Expression:
    """The texts of an expression as they stand in a JSON string, between its quotes; of control characters those with a short escape."""
    match expression:
        case Chars(ranges):
            plain = minus(ranges, _ESCAPED)
            spelled = [literal(text) for code, text in _SHORT.items() if any(low <= code <= high for low, high in ranges)]
            if not spelled or (len(ranges) > 1 and plain and ranges[-1][1] > 0x7F):
                return Chars(plain) if plain else Choice(tuple(spelled))
            return Choice((*([Chars(plain)] if plain else []), *spelled))
        case Sequence(items):
            return Sequence(tuple(map(in_json_string, items)))
        case Choice(items):
            return Choice(tuple(map(in_json_string, items)))
        case Repeat(item, least, most):
            return Repeat(in_json_string(item), least, most)
        case Rule(_):
            return expression


def _array(place: str, node: dict[str, Any]) -> dict[str, Any]:
    if isinstance(node.get("items"), list):
        raise refused(f"{place}/items: a list of schemas is written prefixItems")
    spelled: dict[str, Any] = {"type": "array", **{name: node[name] for name in ("minItems", "maxItems") if name in node}}
    if "prefixItems" in node:
        spelled["prefixItems"] = [_schema(f"{place}/prefixItems/{index}", item) for index, item in enumerate(node["prefixItems"])]
    if "items" in node:
        spelled["items"] = _schema(f"{place}/items", node["items"])
    return spelled


def _object(place: str, node: dict[str, Any]) -> dict[str, Any]:
    others = node.get("additionalProperties", True)
    named = dict(node.get("properties", {}))
    for name in node.get("required", ()):
        if name not in named and others is False:
            raise refused(f"{place}/required: {name} is required, and additionalProperties forbids it")
        named.setdefault(name, others)
    counts = [keyword for keyword in ("minProperties", "maxProperties") if keyword in node]
    if counts and (named or "patternProperties" in node):
        raise refused(f"{place}/{counts[0]}: xgrammar keeps to it only where no properties are named; the backend llguidance does")
    if "patternProperties" in node and (named or others is not False):
        raise refused(f"{place}/patternProperties: xgrammar keeps to it only alone, with additionalProperties false")
    spelled: dict[str, Any] = {"type": "object", **{name: node[name] for name in counts}}
    if named:
        spelled["properties"] = {name: _schema(f"{place}/properties/{name}", item) for name, item in named.items()}
        spelled["required"] = list(node.get("required", ()))
    if "patternProperties" in node:
        spelled["patternProperties"] = {
            _pattern(place, read_search(pattern)): _schema(f"{place}/patternProperties", item)
            for pattern, item in node["patternProperties"].items()
        }
    spelled["additionalProperties"] = _schema(f"{place}/additionalProperties", others)
    return spelled
