"""JSON schemas: what is generated is an instance, and what cannot be kept to is refused with its place."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.errors import TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.compiler_process import compile_one
from tests.support.schemas import random_schema
from tests.unit.worker.constraints.walking import matches, sentences

NODE = {"type": "object", "properties": {"v": {"type": "integer", "maximum": 9}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}
KEPT: dict[str, Any] = {
    "maxLength": {"type": "string", "maxLength": 5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{1,5}$"},
    "pattern that is found": {"type": "string", "pattern": "^ab|cd$"},
    "pattern with a quote": {"type": "string", "pattern": '^a"\\\\b?\n$'},
    "any three": {"type": "string", "pattern": "^.{3}$"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 17},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7},
    "enum": {"enum": ["a", 1, None, {"x": [1]}, 'q"uote']},
    "enum of a type": {"type": "string", "enum": ["a", 1]},
    "const": {"const": {"a": [1, 2, "é\n"]}},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "types": {"type": ["string", "null"], "maxLength": 2},
    "recursion": {"$ref": "#/$defs/n", "$defs": {"n": {**NODE, "additionalProperties": False}}},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "boolean"},
    },
    "formats": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": name} for name in ("date", "ipv4", "uuid")],
        "minItems": 3,
        "items": False,
    },
    "true": True,
}
REFUSED: list[tuple[Any, str]] = [
    (False, "nothing satisfies it"),
    ([1], "not a list"),
    ({"type": "foo"}, "foo"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {"type": "null"}}, "#/if: no backend keeps to if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "string", "format": "idn-email"}, "idn-email"),
    ({"type": "string", "pattern": "(?=a)"}, "#/pattern: the regular expression holds look-ahead"),
    ({"type": "string", "pattern": "a{1000000}"}, "asks for 1000000"),
    ({"type": "array", "maxItems": 10**9}, "#/maxItems asks for 1000000000"),
    ({"type": "array", "minItems": -1}, "#/minItems is a number from 0 on"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"enum": []}, "e"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
    ({"$ref": "http://x/y"}, "lies outside the schema"),
    ({"$ref": "#/$defs/q"}, "names nothing"),
    ({"$ref": "#q"}, "is an anchor"),
    ({"$ref": "#"}, "# needs itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "needs itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#/properties/a needs itself"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "required": ["a"]}, "needs itself"),
    ({"properties": 3}, "#/properties is an object of schemas"),
    ({"items": 3}, "#/items: a schema is an object or a truth value"),
]


def constraint_of(schema: Any, **options: bool) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),), **options)


def validate(text: str, schema: Any) -> None:
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", KEPT)
def test_what_is_generated_is_an_instance(backend: Backend, name: str):
    for text in sentences(backend, constraint_of(KEPT[name]), 8):
        validate(text, KEPT[name])


@pytest.mark.parametrize("seed", range(500, 512))
def test_what_is_generated_is_an_instance_of_random_schemas(backend: Backend, seed: int):
    schema = random_schema(seed)
    for text in sentences(backend, constraint_of(schema), 2, longest=400):
        validate(text, schema)


@pytest.mark.parametrize(("schema", "trouble"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_cannot_be_kept_to_is_refused_and_named(backend: Backend, schema: Any, trouble: str):
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        compile_one(backend, constraint_of(schema).to_proto().SerializeToString())


@pytest.mark.parametrize(
    ("schema", "trouble"),
    [
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "#/allOf"),
        ({"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}}, "maxLength beside $ref"),
        ({"anyOf": [{"required": ["b"]}], "properties": {}}, "properties beside anyOf"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "one of pattern, format and a length"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"minLength": 3, "minimum": 3}, "needs a type"),
        ({"$defs": {"a": {"contains": {}}}}, "#/$defs/a/contains"),
    ],
)
def test_what_xgrammar_would_let_pass_is_refused_by_name(backend: Backend, schema: Any, trouble: str):
    if backend.name != "xgrammar":
        return
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        compile_one(backend, constraint_of(schema).to_proto().SerializeToString())


def test_a_schema_nested_too_deeply_is_refused(backend: Backend):
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    with pytest.raises(TokenloomError, match="nested"):
        compile_one(backend, constraint_of(deep).to_proto().SerializeToString())
    deeper = Constraint(ConstraintKind.JSON_SCHEMA, ('{"items":' * 100_000,)).to_proto().SerializeToString()
    with pytest.raises(TokenloomError, match="nested"):
        compile_one(backend, deeper)


def test_white_space_is_bounded_and_compact_has_none(backend: Backend):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    assert matches(backend, constraint_of(schema), '{\n      "a" : null\n}')
    assert matches(backend, constraint_of(schema), "{\r\n" + " " * 16 + '"a": null\n}')
    assert not matches(backend, constraint_of(schema), '{     "a":null}')
    assert not matches(backend, constraint_of(schema), '{\n\n"a":null}')
    assert matches(backend, constraint_of(schema, compact=True), '{"a":null}')
    assert not matches(backend, constraint_of(schema, compact=True), '{"a": null}')


def test_any_object_is_an_object_and_nothing_else(backend: Backend):
    constraint = Constraint(ConstraintKind.JSON_OBJECT)
    assert matches(backend, constraint, '{"a": [1, {"b": null}], "c": "é\\n"}')
    assert not matches(backend, constraint, "[1]")
    assert not matches(backend, constraint, '{"a": 1')


def test_a_client_cannot_loosen_the_options_of_the_backend(llguidance: Backend):
    schema = {"x-guidance": {"whitespace_pattern": "x*", "lenient": True}, "type": "array", "maxItems": 0}
    assert not matches(llguidance, constraint_of(schema), "[xxx]")
    with pytest.raises(TokenloomError, match="not"):
        compile_one(llguidance, constraint_of({**schema, "not": {}}).to_proto().SerializeToString())
