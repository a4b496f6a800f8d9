import pytest

from services.gateway.parsers.base import CallArguments, CallBegins
from services.gateway.parsers.llama3 import Llama3JsonParser
from tests.unit.gateway.parsers.texts import Read, after_each, read

F = ("f", '{"a": 1}')
CALL = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, [F]),
        (f"\n {CALL}\n", [F]),
        (f"<|python_tag|>{CALL}", [F]),
        (f"<|python_tag|> {CALL}; {CALL}", [F, F]),
        (f"{CALL};{CALL};\n{CALL}", [F, F, F]),
        (f"{CALL}\n{CALL}", [F, F]),
        (f"{CALL}<|python_tag|>{CALL}", [F, F]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', [F]),
        ('{"parameters": {"a": 1}, "name": "f"}', [F]),
        ('{"name": "f", "arguments": {"a": 1}}', [F]),
        (f"{CALL}, {CALL}", [F, F]),
        (f"[{CALL}, {CALL}]", [F, F]),
        (f"[\n {CALL}\n]\n", [F]),
        (f"<|python_tag|>[{CALL}]", [F]),
        (f"{CALL};<|python_tag|>{CALL};", [F, F]),
        (f"{CALL}}}\n{CALL}}}", [F, F]),
        (f"[{CALL}, ", [F]),
    ],
)
def test_calls(text, calls):
    assert read(Llama3JsonParser, text) == Read(calls=calls)


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        " {",
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 7}',
        "{'name': 'f'}",
        "<|python_tag|>print(1)",
        "a <|python_",
        "<|python_tag|>",
        '<|python_tag|>brave_search.call(query="x")',
        "see {x}, [1] and {}",
        "[{}]",
        '[{"name": "Bob"}, 1]',
        '{"of": {"name": "f", "parameters": {}}}',
        "{ [ { <|python_tag|> {",
        '{"name": "f", "parameters": ',
    ],
)
def test_json_that_is_no_call_and_code_are_content(text):
    assert read(Llama3JsonParser, text) == Read(text)


def test_text_before_a_tag_and_behind_calls_is_content():
    assert read(Llama3JsonParser, f"I look. <|python_tag|>{CALL}") == Read("I look.", calls=[F])
    assert read(Llama3JsonParser, f"{CALL} and so on") == Read("and so on", calls=[F])
    assert read(Llama3JsonParser, f"{CALL}; no") == Read("; no", calls=[F])
    assert read(Llama3JsonParser, f"[{CALL}] and so on") == Read("and so on", calls=[F])
    assert read(Llama3JsonParser, f"{CALL};<|pyth") == Read(";<|pyth", calls=[F])


def test_calls_are_found_behind_prose():
    assert read(Llama3JsonParser, f"See: {CALL}") == Read("See:", calls=[F])
    assert read(Llama3JsonParser, f"I think {{x}} and [1] {CALL}") == Read("I think {x} and [1]", calls=[F])
    assert read(Llama3JsonParser, f"Both: [{CALL}, {CALL}] at once, {CALL}.") == Read("Both:  at once, .", calls=[F, F, F])
    assert read(Llama3JsonParser, f'{{"name": "Bob"}}\n{CALL}') == Read('{"name": "Bob"}', calls=[F])
    assert read(Llama3JsonParser, f"{{{CALL}") == Read("{", calls=[F])


def test_arguments_come_as_they_are_written():
    pieces = ['{"name": "f", ', '"parameters": {', '"a": 1', "}}", "; ", '{"name": "g", "parameters": {}', "}"]
    assert after_each(Llama3JsonParser, pieces) == [
        [],
        [CallBegins(0, "f"), CallArguments(0, "{")],
        [CallArguments(0, '"a": 1')],
        [CallArguments(0, "}")],
        [],
        [CallBegins(1, "g"), CallArguments(1, "{}")],
        [],
        [],
    ]
