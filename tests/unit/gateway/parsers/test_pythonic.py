import pytest

from services.gateway.parsers.base import CallArguments, CallBegins, Content
from services.gateway.parsers.pythonic import PythonicParser
from tests.unit.gateway.parsers.texts import Read, after_each, read


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", "{}")]),
        ("\n[ f ( ) ]".replace("f (", "f("), [("f", "{}")]),
        ("[f(a=1), g(b=\"x\", c=[None, {'d': True}])]", [("f", '{"a": 1}'), ("g", '{"b": "x", "c": [null, {"d": true}]}')]),
        ("[f( a = 1 ,\n b=2, ) , ]", [("f", '{"a": 1, "b": 2}')]),
        ("[a.b(c=')]')]", [("a.b", '{"c": ")]"}')]),
        ("[f(a='</x>\\n\\'')]", [("f", '{"a": "</x>\\n\'"}')]),
    ],
)
def test_calls(text, calls):
    assert read(PythonicParser, text) == Read(calls=calls)


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        " [",
        "[]",
        "[1, 2]",
        "[see below]",
        "[note(s)] first",
        "[f(1)]",
        "[f(",
        "[f(a",
        "[f(a,",
        "[f (a=1)]",
        "[1f(a=1)]",
        "[.f(a=1)]",
        "[f.(a=1)]",
        "[(a=1)]",
        "[f(1a=1)]",
        "See [f(a=1)]",
        "f(a=1)",
        "[" + "f" * 1000 + "(a=1)]",
        "[f(" + "a" * 1000 + "=1)]",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text):
    assert read(PythonicParser, text) == Read(text)


def test_what_follows_the_list_is_content():
    assert read(PythonicParser, "[f(a=1)]\nThere. [f(a=1)]") == Read("There. [f(a=1)]", calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ("[f(a=1+1)]", '{"a": ', "1+1)]"),
        ("[f(a=g(1))]", '{"a": ', "g(1))]"),
        ("[f(a=(1, 2))]", '{"a": ', "(1, 2))]"),
        ("[f(a=1, a=2)]", '{"a": 1', ", a=2)]"),
        ("[f(a=1, 2)]", '{"a": 1', ", 2)]"),
        ("[f(a=1, **b)]", '{"a": 1', ", **b)]"),
        ("[f(a=1 b=2)]", '{"a": 1', " b=2)]"),
        ("[f(a=[1, {'b' 'c'}])]", '{"a": [1, {"b"', " 'c'}])]"),
        ("[f(a='\\N{x}')]", '{"a": "', "\\N{x}')]"),
        ("[f(a=1)]]", '{"a": 1}', "]"),
        ("[f(a=1) g()]", '{"a": 1}', " g()]"),
    ],
)
def test_what_breaks_within_a_call_ends_it_and_the_rest_is_content(text, arguments, content):
    message = read(PythonicParser, text)
    assert message.calls == [("f", arguments)]
    assert message.content.strip() == content.strip()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("[f(a=1)", '{"a": 1}'), ("[f(a=1), ", '{"a": 1}'),
     ("[f(a=1", '{"a": 1'), ("[f(a='b", '{"a": "b'), ("[f(a=", '{"a": '), ("[f(a=1, ", '{"a": 1')],
)  # fmt: skip
def test_output_that_ends_within_a_call_ends_it_there(text, arguments):
    assert read(PythonicParser, text) == Read(calls=[("f", arguments)])


def test_values_come_as_they_are_written():
    pieces = ["[f(te", "xt=", '"ein', " Text", '", n', "=1", "2", ", m=None)", "] ok"]
    assert after_each(PythonicParser, pieces) == [
        [],
        [CallBegins(0, "f"), CallArguments(0, '{"text": ')],
        [CallArguments(0, '"ein')],
        [CallArguments(0, " Text")],
        [CallArguments(0, '"')],
        [CallArguments(0, ', "n": ')],
        [],
        [CallArguments(0, '12, "m": null}')],
        [Content("ok")],
        [],
    ]
