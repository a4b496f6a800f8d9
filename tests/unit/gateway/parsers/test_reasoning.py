import pytest

from services.gateway.parsers.base import Content, Reasoning
from services.gateway.parsers.hermes import HermesParser
from services.gateway.parsers.json_output import RequiredCalls
from services.gateway.parsers.reasoning import PlainText, ReasoningParser
from tests.unit.gateway.parsers.texts import Read, after_each, read


def deepseek_r1():
    return ReasoningParser(PlainText(), always=True)


def qwen3():
    return ReasoningParser(PlainText(), always=False)


@pytest.mark.parametrize("new", [deepseek_r1, qwen3])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("\n<think>\nHm.\n</think>\n\nYes.\n", "\nHm.\n", "\n\nYes.\n"),
        ("<think></think>Yes.", "", "Yes."),
        ("<think>a</thin</think>b</think>c", "a</thin", "b</think>c"),
        ("<think>no end", "no end", ""),
        ("<think>no end</th", "no end</th", ""),
        ("<think>", "", ""),
        ("", "", ""),
    ],
)
def test_reasoning_stands_between_the_markers(new, text, reasoning, content):
    assert read(new, text) == Read(content, reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("Hm.</think>Yes.", "Hm.", "Yes."), (" Hm. ", " Hm. ", ""), ("<thi", "<thi", ""),
     ("  ", "  ", ""), ("</think>Yes.", "", "Yes."), ("a<think>b", "a<think>b", "")],
)  # fmt: skip
def test_deepseek_r1_begins_within_the_reasoning(text, reasoning, content):
    assert read(deepseek_r1, text) == Read(content, reasoning)


@pytest.mark.parametrize("text", ["Yes.", " Yes. ", "<thi", " ", "Yes. <think>Hm.</think>", "Hm.</think>Yes."])
def test_qwen3_reasons_only_where_it_says_so_at_once(text):
    assert read(qwen3, text) == Read(text)


def test_nothing_certain_is_held():
    assert after_each(deepseek_r1, ["Hm", " <", "/think> ", "Yes"]) == [
        [Reasoning("Hm")],
        [Reasoning(" ")],
        [Content(" ")],
        [Content("Yes")],
        [],
    ]


def test_calls_follow_the_reasoning_and_within_it_there_are_none():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"I could {call}.</think>\n\n{call}"
    assert read(lambda: ReasoningParser(HermesParser(), always=True), text) == Read("", f"I could {call}.", [("f", "{}")])


def test_json_follows_the_reasoning():
    text = '<think>So.</think>\n[{"name": "f", "parameters": {}}]'
    assert read(lambda: ReasoningParser(RequiredCalls(), always=False), text) == Read("", "So.", [("f", "{}")])
