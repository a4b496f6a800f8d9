import json

import pytest

from services.gateway.parsers.base import CallArguments, CallBegins, Content
from services.gateway.parsers.hermes import HermesParser
from services.gateway.parsers.json_scan import MAX_DEPTH
from tests.unit.gateway.parsers.texts import Read, after_each, read

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_a_call_is_no_content():
    assert read(HermesParser, CALL) == Read(calls=[("f", '{"a": 1}')])


def test_text_around_calls_is_content_and_blanks_beside_them_are_so_between_two_pieces_of_it():
    text = f"Let me see.\n\n{CALL}\n{CALL}\nThat is it.\n"
    assert read(HermesParser, text) == Read("Let me see.\n\n\n\nThat is it.", calls=[("f", '{"a": 1}')] * 2)
    assert read(HermesParser, f" \n{CALL} ") == Read(calls=[("f", '{"a": 1}')])
    assert read(HermesParser, f"\n{CALL}\n So.") == Read("So.", calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize("text", ["Hello", " Hello \n", "\n\n", "a < b", "<tool_", "<tool_cal>", "5 <", "</tool_call>", "<tools>"])
def test_text_without_a_call_stays_as_it_is(text):
    assert read(HermesParser, text) == Read(text)


def test_what_is_certain_is_given_at_once():
    pieces = ["Wait", " <", "b> <tool", "_call>", '{"name": "f"', ', "argum', 'ents": ', '{"te', 'xt": "a', "b", '"}', "}", "</tool_call>"]
    assert after_each(HermesParser, pieces) == [
        [Content("Wait")],
        [],
        [Content(" <b>")],
        [],
        [],
        [],
        [],
        [CallBegins(0, "f"), CallArguments(0, '{"te')],
        [CallArguments(0, 'xt": "a')],
        [CallArguments(0, "b")],
        [CallArguments(0, '"}')],
        [],
        [],
        [],
    ]


def test_arguments_are_the_models_own_text():
    arguments = '{ "a":1e5,"b" : [ 1.50, "\\u00e9\\ud83d\\/" ], "é": "😀" }'
    assert read(HermesParser, f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>').calls == [("f", arguments)]


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", "}}</tool_call>", '\\"}}', "\\\\", "{"])
def test_markers_and_brackets_within_strings_are_text(inside):
    (name, arguments), = read(HermesParser, f'<tool_call>{{"name": "f", "arguments": {{"a": "{inside}"}}}}</tool_call>').calls  # fmt: skip
    assert name == "f"
    assert json.loads(arguments) == json.loads(f'{{"a": "{inside}"}}')


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"id": [1, {"name": "g"}], "name": "f", "type": null, "arguments": {"a": 1}, "more": -1.5e3}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"arguments": "{\\"a\\": \\"\\ud83d\\"}", "name": "f"}', '{"a": "\\ud83d"}'),
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": " "}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"n\\u0061me": "f", "arguments": {}}', "{}"),
    ],
)
def test_ways_to_write_arguments(written, arguments):
    assert read(HermesParser, f"<tool_call>{written}</tool_call>") == Read(calls=[("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>f(1)</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": ',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": nothing}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "parameters": {}, "name": "f"}</tool_call>',
        "<tool_call>{}</tool_call>",
        "<tool_call>{'name': 'f'}</tool_call>",
        "  <tool_call>  {,}",
        '<tool_call>{"a": ' + "[" * 100_000,
    ],
)
def test_what_began_as_a_call_and_is_none_is_content_to_the_letter(text):
    assert read(HermesParser, text) == Read(text)


def test_a_second_marker_begins_anew():
    assert read(HermesParser, f"<tool_call><tool_call>oh {CALL}") == Read("<tool_call><tool_call>oh", calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize("end", ["", "}", "}\n", "}</tool", "}</tool_call>", ', "id": 7', ', "id"'])
def test_a_call_counts_though_its_marker_is_not_closed(end):
    assert read(HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}' + end) == Read(calls=[("f", '{"a": 1}')])


def test_output_that_ends_within_arguments_ends_the_call_there():
    assert read(HermesParser, 'So <tool_call>{"name": "f", "arguments": {"a": "b') == Read("So", calls=[("f", '{"a": "b')])


def test_arguments_that_break_end_the_call_and_the_rest_is_content():
    text = '<tool_call>{"name": "f", "arguments": {"a": oh}}</tool_call>'
    assert read(HermesParser, text) == Read("oh}}", calls=[("f", '{"a": ')])
    assert read(HermesParser, f"{text} Well.") == Read("oh}} Well.", calls=[("f", '{"a": ')])


@pytest.mark.parametrize("inside", ["", "}", "}}\n", " {CALL}", "\n{CALL}\n{CALL}}\n"])
def test_further_calls_and_stray_braces_before_the_closing_marker_are_no_content(inside):
    one = '{"name": "f", "arguments": {"a": 1}}'
    text = f"A <tool_call>{one}{inside.replace('{CALL}', one)}</tool_call> b"
    assert read(HermesParser, text) == Read("A  b", calls=[("f", '{"a": 1}')] * (1 + inside.count("{CALL}")))


@pytest.mark.parametrize("inside", [", so", ' {"a": 1}', "} and", " <b>"])
def test_what_else_stands_there_is_content_and_the_marker_is_not(inside):
    text = f'<tool_call>{{"name": "f", "arguments": {{}}}}{inside}</tool_call> </tool_call>'
    assert read(HermesParser, text) == Read(f"{inside.lstrip()} </tool_call>", calls=[("f", "{}")])
    assert read(HermesParser, text[:-22]) == Read(inside.lstrip(), calls=[("f", "{}")])


def test_deep_arguments_are_bounded():
    deep = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert read(HermesParser, f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>').calls == [("f", deep)]
    message = read(HermesParser, '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000)
    assert len(message.calls[0][1]) + len(message.content) == len('{"a": ') + 5000


def test_a_call_of_an_unknown_tool_is_given_on():
    assert read(HermesParser, '<tool_call>{"name": "no such tool", "arguments": {}}</tool_call>').calls == [("no such tool", "{}")]
