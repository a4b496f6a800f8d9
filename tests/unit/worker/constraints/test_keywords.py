"""Keywords that say nothing are no trouble, and those that no backend keeps to are refused with their place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from libs.errors import TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.compiler_process import compile_one
from tests.unit.worker.constraints.test_schemas import constraint_of, validate
from tests.unit.worker.constraints.walking import matches, sentences

NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TWO_NULLS = '{"a":null,"b":null}'
SAYS_NOTHING: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, "[null,null]"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 1}, "[null]"),
    ({"type": "array", "items": {"type": "null"}, "minContains": 2, "maxContains": 3}, "[]"),
    ({"type": "array", "items": {"type": "null"}, "contains": {"type": "string"}, "minContains": 0}, "[null]"),
    ({"type": "array", "items": {"type": "null"}, "additionalItems": False, "minItems": 0}, "[null]"),
    ({"type": "null", "if": {"type": "string"}}, "null"),
    ({"type": "null", "then": False, "else": False}, "null"),
    ({"type": "null", "not": False}, "null"),
    ({"type": "string", "minLength": 0, "format": "date"}, '"2020-02-20"'),
    ({"type": "integer", "multipleOf": 1, "minimum": 3, "maximum": 3}, "3"),
    ({"type": "boolean", "minimum": 3}, "true"),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 2.0}, "[null,null]"),
    ({**NAMED, "propertyNames": {}, "unevaluatedProperties": True}, TWO_NULLS),
    ({**NAMED, "dependencies": {"a": ["b"]}}, TWO_NULLS),
    ({**NAMED, "dependentRequired": {"a": ["b"], "c": []}, "dependentSchemas": {"a": True}}, TWO_NULLS),
    ({**NAMED, "minProperties": 2}, TWO_NULLS),
    ({**NAMED, "maxProperties": 2}, TWO_NULLS),
    ({"type": "string", "format": "password", "maxLength": 3}, '"pwd"'),
    ({"type": "string", "format": "path", "pattern": "^/a$"}, '"/a"'),
]
REFUSED: list[tuple[Any, str]] = [
    ({"type": 3}, "#/type: 3 is no type"),
    ({"items": {"type": []}}, "#/items/type: an empty list is no type"),
    ({"items": {"enum": 3}}, "#/items/enum is a list of values"),
    ({"items": {"oneOf": []}}, "#/items/oneOf is empty"),
    ({"items": {"type": "string", "minLength": 5, "maxLength": 3}}, "#/items: nothing satisfies minLength 5 and maxLength 3"),
    ({"enum": ["\ud800"]}, "half a surrogate pair"),
    ({"type": "number", "multipleOf": 1e-20, "minimum": 0}, "#/multipleOf"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a/uniqueItems: no backend keeps to uniqueItems"),
    ({"items": {"contains": {}, "minContains": 1}}, "#/items/contains: no backend keeps to contains"),
    ({"items": {"unevaluatedItems": False}}, "#/items/unevaluatedItems"),
    ({**NAMED, "required": [], "dependencies": {"a": ["b"]}}, "#/dependencies"),
    ({**NAMED, "dependentSchemas": {"a": {"minProperties": 1}}}, "#/dependentSchemas"),
    ({"type": "array", "minContains": "x"}, "#/minContains is a number from 0 on"),
    ({"properties": {"a/b": {"format": "uri-template"}}}, "#/properties/a~1b/format: no backend keeps to 'uri-template'; date, date-time"),
    ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}}, "#/minProperties: more than 1"),
    ({"items": {**NAMED, "required": ["a"], "maxProperties": 1}}, "#/items/maxProperties: no backend counts"),
    ({"type": "object", "patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 2}, "#/minProperties"),
]


@pytest.mark.parametrize(("schema", "inside"), SAYS_NOTHING)
def test_what_says_nothing_is_no_trouble(backend: Backend, schema: dict[str, Any], inside: str):
    assert matches(backend, constraint_of(schema), inside)
    for text in sentences(backend, constraint_of(schema), 3):
        validate(text, schema)


@pytest.mark.parametrize(("schema", "trouble"), REFUSED)
def test_what_no_backend_keeps_to_is_refused_with_its_place(backend: Backend, schema: Any, trouble: str):
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        compile_one(backend, constraint_of(schema).to_proto().SerializeToString())


def test_a_format_of_another_type_than_strings_says_nothing(backend: Backend):
    assert matches(backend, constraint_of({"type": "integer", "format": "int64", "minimum": 7, "maximum": 7}), "7")


@pytest.mark.parametrize(("factor", "inside", "outside"), [(128, "256", "127"), (10_007, "20014", "10008")])
def test_a_factor_is_kept_to_or_refused(backend: Backend, factor: int, inside: str, outside: str):
    constraint = constraint_of({"type": "integer", "multipleOf": factor})
    if backend.name == "xgrammar" and factor > 1024:
        with pytest.raises(TokenloomError, match="#/multipleOf: xgrammar keeps to it only up to 1024"):
            compile_one(backend, constraint.to_proto().SerializeToString())
    else:
        assert matches(backend, constraint, inside)
        assert not matches(backend, constraint, outside)


def test_a_factor_and_bounds_are_kept_to_together(llguidance: Backend):
    schema = {"type": "integer", "multipleOf": 7, "minimum": 10, "exclusiveMaximum": 35}
    assert [value for value in range(50) if matches(llguidance, constraint_of(schema), str(value))] == [14, 21, 28]
