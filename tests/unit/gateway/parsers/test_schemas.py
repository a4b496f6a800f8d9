"""Schemas of tools and of outputs, made ready for a compiler."""

from __future__ import annotations

import pytest

from services.gateway.parsers.schemas import closed_objects

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OBJECT, CLOSED),
        ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
        ({"properties": {"properties": OBJECT}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"$defs": {"X": OBJECT}, "$ref": "#/$defs/X"}, {"$defs": {"X": CLOSED}, "$ref": "#/$defs/X"}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OBJECT]}, {"allOf": [CLOSED]}),
    ],
)
def test_objects_that_list_properties_and_say_nothing_of_others_are_closed(schema, expected):
    assert closed_objects(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OBJECT, "additionalProperties": True},
        {**OBJECT, "additionalProperties": {"type": "string"}},
        {"allOf": [OBJECT, {"properties": {"b": {}}}]},
        {**OBJECT, "anyOf": [{"properties": {"b": {}}}]},
        {"$defs": {"Base": OBJECT}, "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {}}}]},
        {"const": OBJECT},
        {"enum": [OBJECT], "default": OBJECT},
    ],
)
def test_what_says_so_is_put_together_of_parts_or_is_no_schema_stays_as_it_is(schema):
    assert closed_objects(schema) == schema
