"""However a text is cut, its parts join to the same; and what the formats allow comes out as it went in."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.parsers.filters import FirstCall, WithoutSpecialTokens
from services.gateway.parsers.hermes import HermesParser
from services.gateway.parsers.json_output import NamedCall, RequiredCalls
from services.gateway.parsers.llama3 import Llama3JsonParser
from services.gateway.parsers.mistral import MistralParser
from services.gateway.parsers.pythonic import PythonicParser
from services.gateway.parsers.reasoning import ReasoningParser
from tests.unit.gateway.parsers.texts import ARGUMENTS, CALLS, NAMES, TEXTS, VALUES, NewParser, cuts, dumped, message_of, mutated, parts_of

Calls = list[tuple[str, dict[str, Any]]]
KEYWORDS = st.dictionaries(NAMES, VALUES, max_size=3)
BLANKS = st.sampled_from(["", " ", "\n", "\n\n  "])


@dataclass
class Format:
    """How a model writes calls. `write` draws a text and the calls that it holds."""

    new: NewParser
    write: st.SearchStrategy[tuple[str, Calls]]


@st.composite
def _object(draw, name, arguments, key):
    pairs = [("name", name), (key, arguments)]
    if draw(st.booleans()):
        pairs.insert(draw(st.integers(0, 2)), ("id", draw(VALUES)))
    return draw(dumped(dict(draw(st.permutations(pairs)))))


@st.composite
def _hermes(draw):
    calls, text = draw(CALLS), draw(st.sampled_from(["", "Let me see.", "a < b\n"]))
    for name, arguments in calls:
        written = draw(_object(name, draw(st.sampled_from([arguments, json.dumps(arguments)])), "arguments"))
        text += f"{draw(BLANKS)}<tool_call>{draw(BLANKS)}{written}{draw(BLANKS)}</tool_call>{draw(BLANKS)}"
    return text, calls


@st.composite
def _llama3(draw):
    calls = draw(CALLS)
    written = [draw(_object(name, arguments, "parameters")) for name, arguments in calls]
    opening, closing = draw(st.sampled_from([("", ""), ("<|python_tag|>", ""), ("I look. <|python_tag|>", ""), ("So: ", ""), ("[", "]")]))
    return opening + draw(st.sampled_from(["; ", ";", ", ", "\n"])).join(written) + closing, calls


@st.composite
def _mistral(draw):
    calls = draw(CALLS)
    before = draw(st.sampled_from(["", "Fine. "]))
    if draw(st.booleans()):
        return before + "".join(f"[TOOL_CALLS]{name}[ARGS]{draw(dumped(arguments))}" for name, arguments in calls), calls
    written = ", ".join(draw(_object(name, arguments, "arguments")) for name, arguments in calls)
    return f"{before}[TOOL_CALLS]{draw(BLANKS)}[{written}]{draw(BLANKS)}", calls


@st.composite
def _pythonic(draw):
    calls = draw(st.lists(st.tuples(NAMES, KEYWORDS), min_size=1, max_size=3))
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]
    return f"{draw(BLANKS)}[{', '.join(written)}]{draw(BLANKS)}", calls


@st.composite
def _required(draw):
    calls = draw(CALLS)
    return draw(dumped([{"name": name, "parameters": arguments} for name, arguments in calls])), calls


@st.composite
def _named(draw):
    arguments = draw(ARGUMENTS)
    return draw(dumped(arguments)), [("it", arguments)]


@st.composite
def _reasoned(draw, opening):
    text, calls = draw(_hermes())
    return f"{opening}{draw(st.sampled_from(['Hm. ', '<tool_call> it is', '']))}</think>{text}", calls


FORMATS = {
    "hermes": Format(HermesParser, _hermes()),
    "llama3_json": Format(Llama3JsonParser, _llama3()),
    "mistral": Format(MistralParser, _mistral()),
    "pythonic": Format(PythonicParser, _pythonic()),
    "required": Format(RequiredCalls, _required()),
    "named": Format(lambda: NamedCall("it"), _named()),
    "deepseek_r1": Format(lambda: ReasoningParser(HermesParser(), always=True), _reasoned("")),
    "qwen3": Format(lambda: ReasoningParser(HermesParser(), always=False), _reasoned("<think>")),
}
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


@every_format
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_format_allows_comes_out_as_it_went_in(form, data):
    text, calls = data.draw(form.write)
    message = message_of(parts_of(form.new, data.draw(cuts(text))))
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == calls
    assert "tool_call>" not in message.content


@pytest.mark.parametrize("name", ["required", "named"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_of_what_a_grammar_asks_for_nothing_is_content_wherever_the_output_ends(name, data):
    form = FORMATS[name]
    text, _ = data.draw(form.write)
    assert message_of(parts_of(form.new, [text[: data.draw(st.integers(0, len(text)))]])).content == ""


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cutting_of_any_text_gives_the_same_parts(form, data):
    text = data.draw(mutated(data.draw(form.write)[0]))
    assert parts_of(form.new, data.draw(cuts(text))) == parts_of(form.new, [text]) == parts_of(form.new, text)


@pytest.mark.parametrize("form", [form for name, form in FORMATS.items() if name not in ("required", "named")])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_text_without_a_call_stays_as_it_is(form, data):
    text = data.draw(mutated(data.draw(st.one_of(TEXTS, form.write.map(lambda written: written[0])))))
    message = message_of(parts_of(form.new, data.draw(cuts(text))))
    if not message.calls and not message.reasoning and "think>" not in text:
        assert message.content == text


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_special_tokens_are_taken_out_however_the_text_is_cut(data):
    text = "".join(data.draw(st.lists(st.sampled_from(["<s>", "<", "s", ">", "</s>", "<|x|>", "|", "a", "/"]), max_size=12)))

    def new():
        return WithoutSpecialTokens(FirstCall(HermesParser()), frozenset({"<s>", "</s>", "<|x|>", "s>a"}))

    assert parts_of(new, data.draw(cuts(text))) == parts_of(new, [text] if text else []) == parts_of(new, text)
