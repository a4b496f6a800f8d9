import pytest

from services.gateway.parsers.base import CallArguments, CallBegins
from services.gateway.parsers.mistral import MistralParser
from tests.unit.gateway.parsers.texts import Read, after_each, read

F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [F, G]),
        ('[TOOL_CALLS][ { "arguments": {"a": 1}, "name": "f", "id": "x" } ]\n', [F]),
        ('[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', [F]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', [F]),
        ('[TOOL_CALLS]f{"a": 1}', [F]),
        ('[TOOL_CALLS] f [ARGS] {"a": 1}', [F]),
        ('[TOOL_CALLS]f[CALL_ID]Xy1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, G]),
        ('[TOOL_CALLS][TOOL_CALLS]g[ARGS]{}', [G]),
        ("[TOOL_CALLS]a.b-c/d:e_1[ARGS]{}", [("a.b-c/d:e_1", "{}")]),
    ],
)  # fmt: skip
def test_calls(text, calls):
    message = read(MistralParser, text)
    assert message.calls == calls
    assert message.content in ("", "[TOOL_CALLS]")


@pytest.mark.parametrize(
    "text",
    [
        "Hello [TOOL",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]two words{}",
        "[TOOL_CALLS]f[CALLS]{}",
        "[TOOL_CALLS](f){}",
        "[TOOL_CALLS]" + "f" * 1000 + "[ARGS]{}",
        "[TOOL_CALLS]f" + " " * 1000 + "{}",
        '[TOOL_CALLS] [{"name": "f", "argu',
        "[1, 2]",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text):
    assert read(MistralParser, text) == Read(text)


def test_text_around_calls_is_content():
    text = 'I look. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}] There.'
    assert read(MistralParser, text) == Read("I look.  There.", calls=[F])
    assert read(MistralParser, 'So[TOOL_CALLS]f[ARGS]{"a": 1}, ok') == Read("So, ok", calls=[F])


def test_an_array_that_breaks_goes_on_as_content():
    assert read(MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, oh]') == Read(", oh]", calls=[F])
    assert read(MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"b": 1}]') == Read(', {"b": 1}]', calls=[F])
    assert read(MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}') == Read(calls=[F])


def test_arguments_come_as_they_are_written():
    pieces = ["[TOOL_CALLS]", "f", "[ARGS]", '{"a"', ": 1", "}", "[TOOL_CALLS]g[ARGS]{"]
    assert after_each(MistralParser, pieces) == [
        [],
        [],
        [],
        [CallBegins(0, "f"), CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1")],
        [CallArguments(0, "}")],
        [CallBegins(1, "g"), CallArguments(1, "{")],
        [],
    ]
