"""Parsing is linear in the text, however small the pieces are."""

import time

import pytest

from services.gateway.parsers.filters import WithoutSpecialTokens
from services.gateway.parsers.hermes import HermesParser
from services.gateway.parsers.json_output import NamedCall, RequiredCalls
from services.gateway.parsers.llama3 import Llama3JsonParser
from services.gateway.parsers.mistral import MistralParser
from services.gateway.parsers.pythonic import PythonicParser
from services.gateway.parsers.reasoning import PlainText, ReasoningParser

SIZE = 3_000
# Each text has a part that grows and that a careless parser would copy or look through again with every piece.
GROWING = {
    "an argument": (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "', "x", '"}}</tool_call>'),
    "an argument before the name": (HermesParser, '<tool_call>{"arguments": {"a": "', "x", '"}, "name": "f"}</tool_call>'),
    "arguments as a text": (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"', "x", '\\"}"}</tool_call>'),
    "blanks": (HermesParser, "a", " ", "b"),
    "markers that begin nothing": (HermesParser, "", "<tool_call>{", ""),
    "nested arrays": (Llama3JsonParser, '{"name": "f", "parameters": {"a": [', "[1],", "[]]}}"),
    "a number": (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1', "0", "}"),
    "a python string": (PythonicParser, "[f(a='", "x", "')]"),
    "python values": (PythonicParser, "[f(a=[", "1,", "])]"),
    "reasoning": (lambda: ReasoningParser(PlainText(), always=True), "", "<", "</think>"),
    "special tokens": (lambda: WithoutSpecialTokens(PlainText(), frozenset({"<s>", "<|x|>"})), "", "<s", ""),
}
# And texts that have many beginnings of calls, which a careless parser would read to the end from each of them.
BEGINNINGS = {
    "calls in prose": (Llama3JsonParser, "", "a {", ""),
    "brackets in prose": (Llama3JsonParser, "", "[ ", ""),
    "calls that begin and are none": (HermesParser, "", '<tool_call>{"a":[', ""),
    "calls without an end": (HermesParser, "", '<tool_call>{"name":"a","arguments":{}}', ""),
    "headers": (MistralParser, "", "[TOOL_CALLS]a", ""),
    "headers with arguments": (MistralParser, "", "[TOOL_CALLS]a[ARGS]{}", ""),
    "headers with ids": (MistralParser, "", "[TOOL_CALLS]a[CALL_ID]b", ""),
    "arrays that break": (MistralParser, "", ' [TOOL_CALLS][{"arguments":{"x":"', ""),
    "names": (PythonicParser, "[", "a.", "(x=1)]"),
    "required calls": (RequiredCalls, '[{"name": "f", "parameters": {"a": [', "[1],", "[]]}}]"),
    "a named call": (lambda: NamedCall("f"), '{"a": "', "\\u00e9", '"}'),
}


def in_characters(new, text):
    """Processor time of a text pushed a character at a time, in seconds."""
    parser, started = new(), time.process_time()
    for character in text:
        parser.push(character)
    parser.finish()
    return time.process_time() - started


def whole(new, text):
    """The same of a text pushed at once."""
    parser, started = new(), time.process_time()
    parser.push(text)
    parser.finish()
    return time.process_time() - started


def growth(new, before, part, behind, processor_time):
    """How many times as long 64 times the text takes."""
    count = SIZE // len(part)
    return processor_time(new, before + part * count * 64 + behind) / processor_time(new, before + part * count + behind)


@pytest.mark.parametrize("case", GROWING)
def test_64_times_the_text_takes_about_64_times_as_long(case):
    # A parser that only copies what it has so far with every character takes 140 times as long. A busy machine may spoil a measurement.
    assert any(growth(*GROWING[case], in_characters) < 110 for _ in range(3))


@pytest.mark.parametrize("case", GROWING | BEGINNINGS)
def test_a_text_that_comes_whole_is_not_looked_through_again_for_each_of_its_parts(case):
    # 200,000 characters take some milliseconds where they are read once, and 100 times as long where they are read to the end at each part.
    assert any(growth(*(GROWING | BEGINNINGS)[case], whole) < 160 for _ in range(3))
