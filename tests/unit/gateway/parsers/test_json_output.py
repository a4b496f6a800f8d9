import pytest

from services.gateway.parsers.base import CallArguments, CallBegins
from services.gateway.parsers.json_output import NamedCall, RequiredCalls
from tests.unit.gateway.parsers.texts import Read, after_each, read


def named():
    return NamedCall("it")


def test_a_list_of_calls():
    text = ' [ {"name": "f", "parameters": {"a": 1}} ,\n{"name": "g", "parameters": {}} ]\n'
    assert read(RequiredCalls, text) == Read(calls=[("f", '{"a": 1}'), ("g", "{}")])


@pytest.mark.parametrize("text", ["", "[]", "no", " no", '{"name": "f"}', "[[]]", '[{"name": "f", "x" ]'])
def test_what_is_no_list_of_calls_is_content(text):
    assert read(RequiredCalls, text) == Read(text)


def test_a_list_that_the_output_ends_within_has_the_calls_that_begun():
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": "c'
    assert read(RequiredCalls, text) == Read(calls=[("f", '{"a": 1}'), ("g", '{"b": "c')])
    assert read(RequiredCalls, text[:50]) == Read(calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize("text", [" ", "[", "[ {", '[{"name": "f"', '[{"name": "f", "param', '[{"name": "f", "parameters": '])
def test_of_a_list_that_the_output_ends_within_nothing_is_content(text):
    assert read(RequiredCalls, text) == Read()
    assert read(named, text[:1].strip("[")) == Read()


def test_the_output_is_the_named_tools_arguments():
    assert read(named, ' {"a": [1]} \n') == Read(calls=[("it", '{"a": [1]}')])
    assert read(named, '{"a": [1') == Read(calls=[("it", '{"a": [1')])
    assert after_each(named, ["{", '"a": "x', '"}']) == [
        [CallBegins(0, "it"), CallArguments(0, "{")],
        [CallArguments(0, '"a": "x')],
        [CallArguments(0, '"}')],
        [],
    ]


@pytest.mark.parametrize("text", ["", "no", "\nno", "[1]", '"{}"'])
def test_what_are_no_arguments_is_content(text):
    assert read(named, text) == Read(text)
