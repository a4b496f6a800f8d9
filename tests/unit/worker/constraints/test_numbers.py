"""Numbers between bounds: everything that the masks allow keeps to the bounds, and something is allowed."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from libs.errors import TokenloomError
from services.worker.constraints.base import Backend
from services.worker.constraints.compiler_process import compile_one
from services.worker.constraints.numbers import Span, expression_of, span_of
from services.worker.constraints.spelling import regex_of
from tests.unit.worker.constraints.test_schemas import constraint_of
from tests.unit.worker.constraints.walking import matches, sentences

NARROW: dict[str, tuple[dict[str, Any], str]] = {
    "tiny": ({"type": "number", "minimum": 1e-10, "maximum": 2e-10}, "0.00000000015"),
    "tiny from an excluded zero": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "0.0000001"),
    "excluded on both sides": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, "0.0005"),
    "beside an excluded whole": ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.1}, "1.01"),
    "negative up to an excluded zero": ({"type": "number", "exclusiveMinimum": -0.001, "exclusiveMaximum": 0}, "-0.0005"),
    "eight decimals": ({"type": "number", "minimum": 0.12345678, "maximum": 0.12345679}, "0.12345678"),
    "an alternative": ({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.01}]}, "0.01"),
    "beyond floats": ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9}, str(2**53 + 4)),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9007199254740992"),
    "all floats": ({"type": "number", "minimum": -1e308, "maximum": 1e308}, "-12.5"),
    "an integer between fractions": ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 2.0}, "1"),
    "one of several types": ({"type": ["integer", "null"], "exclusiveMinimum": 7, "maximum": 9}, "8"),
    "within an object": (
        {
            "type": "object",
            "properties": {"a": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}},
            "required": ["a"],
            "additionalProperties": False,
        },
        '{"a":0.0000000005}',
    ),
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, "#/exclusiveMinimum is a number, not a truth value"),
    ({"properties": {"a": {"type": "number", "minimum": "1"}}}, "#/properties/a/minimum is a number, not '1'"),
    ({"type": "integer", "multipleOf": 0}, "#/multipleOf is greater than 0"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "#: no integer"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "#: no number"),
    ({"type": "number", "minimum": 1e300}, "#: no number"),
    ({"items": {"type": "integer", "minimum": 10**400}}, "#/items: no integer"),
]


def bounds(*, integers: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Adversarial bounds: near zero, near each other, of many digits, at powers of ten."""
    end = st.one_of(
        st.integers(-1200, 1200),
        st.sampled_from([0, 1, -1, 10, 99, 100, 10**15, 2**53 - 1, -(2**53)]),
        st.builds(lambda digits, places: digits / 10**places, st.integers(-(10**6), 10**6), st.integers(0, 10)),
    )
    width = st.one_of(st.sampled_from([0, 1e-9, 1e-3, 1, 2, 9, 10, 1000]), st.integers(0, 5000))

    def schema(low: float, wide: float, out: tuple[bool, bool], sides: int) -> dict[str, Any]:
        lower, upper = ("exclusiveMinimum" if out[0] else "minimum"), ("exclusiveMaximum" if out[1] else "maximum")
        ends = {lower: low, upper: low + wide}
        return {"type": "integer" if integers else "number", **{name: ends[name] for name in ([lower, upper], [lower], [upper])[sides]}}

    return st.builds(schema, end, width, st.tuples(st.booleans(), st.booleans()), st.integers(0, 2))


def any_bounds() -> st.SearchStrategy[dict[str, Any]]:
    return st.booleans().flatmap(lambda integers: bounds(integers=integers))


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def python_regex(span: Span) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: f"\\x{int(code[1], 16):02x}", regex_of(expression_of(span))))


def text_of(scaled: int, places: int) -> str:
    digits = str(abs(scaled)).zfill(places + 1)
    return ("-" if scaled < 0 else "") + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_and_wide_ranges_are_kept_to(backend: Backend, name: str):
    schema, inside = NARROW[name]
    assert matches(backend, constraint_of(schema), inside)
    for text in sentences(backend, constraint_of(schema), 6):
        assert is_valid(text, schema), text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=any_bounds())
def test_what_is_allowed_keeps_to_any_bounds_and_something_is(backend: Backend, schema: dict[str, Any]):
    try:
        span_of("#", schema, integers=schema["type"] == "integer", max_places=15)
    except TokenloomError:
        assume(False)
    texts = sentences(backend, constraint_of(schema, compact=True), 3)
    assert texts
    assert [text for text in texts if not is_valid(text, schema)] == []


@settings(max_examples=150, deadline=None)
@given(schema=any_bounds(), near=st.lists(st.integers(-30, 30), min_size=1, max_size=8))
def test_the_texts_of_a_range_are_its_numbers(schema: dict[str, Any], near: list[int]):
    try:
        span = span_of("#", schema, integers=schema["type"] == "integer")
    except TokenloomError:
        return
    pattern = python_regex(span)
    for end in (span.low, span.high):
        for value in [] if end is None else [end + step for step in near]:
            within = (span.low is None or value >= span.low) and (span.high is None or value <= span.high)
            assert bool(pattern.fullmatch(text_of(value, span.places))) == within
            if within:
                assert is_valid(text_of(value, span.places), schema)


def test_the_decimals_of_a_range_are_finer_than_those_of_its_bounds():
    span = span_of("#", {"exclusiveMinimum": 0, "maximum": 0.5}, integers=False)
    assert Fraction(span.low or 0, 10**span.places) <= Fraction(1, 10**6)
    assert python_regex(span).fullmatch("0.25")
    assert not python_regex(span).fullmatch("0")


def test_integers_of_any_size_have_bounds_with_xgrammar_alone(backend: Backend):
    schema = {"type": "integer", "minimum": 10**25 + 3, "maximum": 10**25 + 7}
    if backend.name == "xgrammar":
        assert [digit for digit in range(10) if matches(backend, constraint_of(schema), str(10**25 + digit))] == [3, 4, 5, 6, 7]
    else:
        with pytest.raises(TokenloomError, match="#: llguidance takes bounds of up to 64 bits"):
            compile_one(backend, constraint_of(schema).to_proto().SerializeToString())


@pytest.mark.parametrize(("schema", "trouble"), WRONG)
def test_bounds_that_are_none_or_leave_nothing_are_refused_by_their_place(backend: Backend, schema: dict[str, Any], trouble: str):
    with pytest.raises(TokenloomError, match=re.escape(trouble)):
        compile_one(backend, constraint_of(schema).to_proto().SerializeToString())
