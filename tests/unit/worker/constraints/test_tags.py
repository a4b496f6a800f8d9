"""Structural tags in both shapes, through the masks of both backends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from libs.constraints import Constraint, ConstraintKind
from libs.errors import TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.compiler_process import compile_one
from tests.unit.worker.constraints.walking import matches

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
CALL = '<f=a>{"city": "Rome"}</f>'
OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=b>", "schema": json.dumps({"type": "null"}), "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</f>"}
TWO_LETTERS = {"type": "const_string", "value": "A:"}


def constraint_of(tag: Any, **options: bool) -> Constraint:
    return Constraint(ConstraintKind.STRUCTURAL_TAG, (json.dumps(tag),), **options)


def triggered(**options: bool) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG], **options}}


@pytest.mark.parametrize(
    ("tag", "inside", "outside"),
    [
        (OLDER, ["free text", f"a {CALL} b", "<f=b>null</f>", f"{CALL}{CALL}"], ["<f=c>", '<f=a>{"town"', "x<f=a>{}</f>"]),
        (triggered(), ["free", f"a {CALL} b"], ["<f=x"]),
        (triggered(at_least_one=True), [CALL, f"{CALL} and {CALL}"], ["free"]),
        (triggered(stop_after_first=True, at_least_one=True), [CALL], [f"{CALL}x", "free"]),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "const_string", "value": "A:"}, {"type": "regex", "pattern": "[0-9]{2}"}],
                }
            },
            ["A:12"],
            ["A:1", "A:123"],
        ),
        (
            {"format": {"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "(" root ")" | "y"'}, {**TAG, "begin": ""}]}},
            ["((y))", '{"city":"Rome"}</f>'],
            ["(y"],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True}},
            [CALL, f"{CALL},{CALL}"],
            ["", f"{CALL};"],
        ),
        ({"format": {"type": "optional", "content": {"type": "const_string", "value": "x"}}}, ["", "x"], ["xx"]),
        ({"format": {"type": "plus", "content": {"type": "const_string", "value": "xy"}}}, ["xy", "xyxy"], ["", "x"]),
    ],
)
def test_a_tag_allows_what_its_formats_say(backend: Backend, tag: Any, inside: list[str], outside: list[str]):
    assert [text for text in inside if not matches(backend, constraint_of(tag), text)] == []
    assert [text for text in outside if matches(backend, constraint_of(tag), text)] == []


@pytest.mark.parametrize(
    ("tag", "trouble"),
    [
        ({"format": {"type": "any_text"}}, "'any_text' is not supported"),
        ({"format": {"type": "tag", "begin": "x"}}, "format: a format tag needs content"),
        ({"format": {**TAG, "style": "xml"}}, "has no style"),
        ({"format": {"type": "sequence", "elements": [triggered()["format"], TAG]}}, "nothing follows them"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "look-ahead"),
        ({"structures": [], "triggers": []}, "at least one"),
        ({**OLDER, "triggers": ["<g="]}, "starts with one of the triggers"),
        ({"structures": [{"begin": "<f=", "schema": {"$ref": "#"}, "end": ""}], "triggers": ["<f="]}, "needs itself"),
        ({}, "has a format"),
        ([1], "is an object"),
    ],
)
def test_what_is_no_tag_is_refused_by_name(backend: Backend, tag: Any, trouble: str):
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        compile_one(backend, constraint_of(tag).to_proto().SerializeToString())


def test_white_space_in_a_tags_json_is_bounded_too(backend: Backend):
    assert matches(backend, constraint_of(triggered()), '<f=a>{    "city":"Rome"}</f>')
    assert not matches(backend, constraint_of(triggered()), f'<f=a>{{{" " * 12}"city":"Rome"}}</f>')


def test_a_tags_json_may_be_without_white_space(backend: Backend):
    assert not matches(backend, constraint_of(triggered(), compact=True), CALL)
    assert matches(backend, constraint_of(triggered(), compact=True), CALL.replace(" ", ""))
