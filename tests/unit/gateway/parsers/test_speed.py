"""Parsing is linear in the text, however small the pieces are."""

import time

import pytest

from services.gateway.parsers.filters import WithoutSpecialTokens
from services.gateway.parsers.hermes import HermesParser
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


def processor_time(new, text):
    parser, started = new(), time.process_time()
    for character in text:
        parser.push(character)
    parser.finish()
    return time.process_time() - started


def growth(new, before, part, behind):
    """How many times as long 64 times the text takes."""
    count = SIZE // len(part)
    return processor_time(new, before + part * count * 64 + behind) / processor_time(new, before + part * count + behind)


@pytest.mark.parametrize("case", GROWING)
def test_64_times_the_text_takes_about_64_times_as_long(case):
    # A parser that only copies what it has so far with every character takes 140 times as long. A busy machine may spoil a measurement.
    assert any(growth(*GROWING[case]) < 110 for _ in range(3))
