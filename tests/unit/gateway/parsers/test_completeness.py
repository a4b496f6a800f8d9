import pytest

from services.gateway.parsers.base import CallArguments, CallBegins, Content
from services.gateway.parsers.completeness import Completeness


def seen(*parts):
    found = Completeness()
    for part in parts:
        found.see([part])
    return found


def call(index, *fragments):
    return CallBegins(index, "f"), *(CallArguments(index, fragment) for fragment in fragments)


def test_without_a_call_nothing_is_complete():
    assert not seen(Content("{}")).called
    assert not seen(Content("{}")).complete


@pytest.mark.parametrize("fragments", [("{}",), ("{", "}"), (" ", '{"a": "}', '"', "} ", " "), ('{"a": [{}]}\n',)])
def test_arguments_that_are_an_object_are_complete(fragments):
    assert seen(*call(0, *fragments)).complete
    assert seen(*call(0, "{}"), Content("so"), *call(1, *fragments)).complete


@pytest.mark.parametrize(
    "fragments", [(), ("{",), (" ",), ('{"a": 1',), ('{"a": "', "x}"), ("{}", "}"), ("{} {}",), ("[]",), ('"{}"',), ("{x}",)]
)
def test_arguments_that_are_less_or_more_than_an_object_are_not(fragments):
    assert seen(*call(0, *fragments)).called
    assert not seen(*call(0, *fragments)).complete
    assert not seen(*call(0, "{}"), *call(1, *fragments)).complete
    assert not seen(*call(0, *fragments), *call(1, "{}")).complete


def test_calls_may_come_between_each_other():
    assert seen(*call(0, "{"), *call(1, "{"), CallArguments(0, "}"), CallArguments(1, "}")).complete
