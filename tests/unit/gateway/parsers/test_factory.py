import importlib.metadata
import json
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.parsers import factory
from services.gateway.parsers.base import CallArguments, CallBegins
from services.gateway.parsers.factory import (
    needs_special_tokens,
    new_parser,
    reasoning_format,
    reasoning_parser_names,
    tool_format,
    tool_parser_names,
)
from services.gateway.parsers.filters import FirstCall
from services.gateway.parsers.hermes import HermesParser
from services.gateway.wanted import Shown, ToolUse
from tests.unit.gateway.parsers.texts import Read, parts_of, read

HERMES = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
MISTRAL = "[TOOL_CALLS]f[ARGS]{}"
LLAMA = '{"name": "f", "parameters": {}}'
PYTHONIC = "[f()]"
TEXTS = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "pythonic": PYTHONIC}
CALLED = Read(calls=[("f", "{}")])
PAGE = Path(__file__).parents[4] / "docs" / "tools.md"


def shown(mode="auto", form="", parallel=True, reasoning=None):
    return Shown(tools=ToolUse(mode, form, ("f",), parallel), reasoning=reasoning)


def test_without_tools_and_reasoning_all_text_is_content_and_there_is_no_parser():
    assert new_parser(Shown(), "hermes") is None


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_read_in_the_operators_format_else_in_the_templates(name):
    assert read(lambda: new_parser(shown(form=name), "hermes"), TEXTS[name]) == CALLED
    assert read(lambda: new_parser(shown(), name), TEXTS[name]) == CALLED
    assert name in tool_parser_names()


def test_for_a_template_of_no_known_format_hermes_is_tried():
    assert read(lambda: new_parser(shown(), ""), HERMES) == CALLED


def test_required_and_named_are_json_whatever_the_format():
    assert read(lambda: new_parser(shown("required", "mistral"), "mistral"), f"[{LLAMA}]") == CALLED
    assert read(lambda: new_parser(shown("named"), "mistral"), "{}") == CALLED


def test_reasoning_comes_before_calls():
    for name, opening in (("deepseek_r1", ""), ("qwen3", "<think>")):
        text = f"{opening}Hm.</think>\n"
        assert read(lambda name=name: new_parser(shown(reasoning=name)), text + HERMES) == Read("", "Hm.", CALLED.calls)
        assert read(lambda name=name: new_parser(Shown(reasoning=name)), text + HERMES) == Read("\n" + HERMES, "Hm.")
        assert reasoning_format(name).markers == ("<think>", "</think>")
        assert name in reasoning_parser_names()


def test_only_the_first_call_is_given_where_calls_are_not_to_be_parallel():
    assert read(lambda: new_parser(shown(parallel=False)), f"One: {HERMES}{HERMES} two") == Read("One:  two", calls=CALLED.calls)
    assert read(lambda: FirstCall(HermesParser()), "a " + HERMES) == Read("a", calls=CALLED.calls)


def test_special_tokens_stay_in_the_text_where_the_format_is_written_with_them():
    assert needs_special_tokens(shown(), "hermes", {"<tool_call>", "<s>"})
    assert needs_special_tokens(shown(), "", {"<tool_call>"})
    assert not needs_special_tokens(shown(), "hermes", {"<s>"})
    assert not needs_special_tokens(shown(), "mistral", frozenset())
    assert needs_special_tokens(shown(), "mistral", {"[TOOL_CALLS]"})
    assert needs_special_tokens(shown(form="mistral"), "hermes", {"[TOOL_CALLS]"})
    assert not needs_special_tokens(shown(), "pythonic", {"<s>"})
    assert not needs_special_tokens(shown("required"), "mistral", {"[TOOL_CALLS]"})
    assert not needs_special_tokens(Shown(), "mistral", {"[TOOL_CALLS]"})


@pytest.mark.parametrize("marker", ["<think>", "</think>"])
def test_markers_of_reasoning_that_are_special_tokens_stay_for_its_parser(marker):
    special = {marker, "<s>", "<|im_end|>"}
    for use in (Shown(reasoning="qwen3"), shown(reasoning="qwen3"), shown("required", reasoning="deepseek_r1")):
        assert needs_special_tokens(use, "hermes", special)
    text = "<s><think>Hm.</think>Yes.<|im_end|>"
    assert read(lambda: new_parser(Shown(reasoning="qwen3"), "", special), text) == Read("Yes.", "Hm.")
    assert read(lambda: new_parser(Shown(reasoning="deepseek_r1"), "", special), text) == Read("Yes.", "Hm.")


def test_where_the_prompt_has_closed_the_reasoning_special_tokens_are_taken_out_all_the_same():
    assert read(lambda: new_parser(Shown(), "", {"<s>", "</think>"}), "<s>Yes.</think>") == Read("Yes.")


def test_where_the_prompt_has_opened_the_reasoning_the_text_begins_within_it():
    for name in ("qwen3", "deepseek_r1"):
        assert read(lambda name=name: new_parser(shown(reasoning=name), reasoning_opened=True), f"Hm.</think>{HERMES}") == Read(
            "", "Hm.", CALLED.calls
        )
    assert read(lambda: new_parser(shown(reasoning="qwen3")), "Hm.</think>") == Read("Hm.</think>")


def test_those_that_the_format_does_not_know_are_taken_out():
    special = {"<|python_tag|>", "<|eom_id|>", "<|eot_id|>"}
    text = "A <|eot_id|>< b <|python_tag|>" + LLAMA + "<|eom_id|>"
    assert read(lambda: new_parser(shown(form="llama3_json"), "", special), text) == Read("A < b", calls=CALLED.calls)
    assert read(lambda: new_parser(shown("named"), "llama3_json", special), "{<|python_tag|>}<|eot_id|>") == CALLED
    assert read(lambda: new_parser(shown(form="hermes"), "", {"<s>"}), "a <s") == Read("a <s")


# The operator's own


def _plug_in(monkeypatch, **values):
    """Entry points as if a package had declared them; modules are made of `values`."""
    points = EntryPoints(
        EntryPoint(name.removeprefix("reasoning_"), value, factory.REASONING_GROUP if name.startswith("reasoning_") else factory.TOOL_GROUP)
        for name, value in values.items()
    )
    monkeypatch.setattr(factory, "entry_points", lambda **selected: points.select(**selected))
    factory._plug_in.cache_clear()


def test_the_example_of_the_documentation_is_a_parser(monkeypatch, tmp_path):
    example, declared = re.findall(r"```(?:python|toml)\n(# acme_parsers.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "acme_parsers.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    assert re.search(r'\[project\.entry-points\."tokenloom\.tool_parsers"\]\nacme = "acme_parsers:ACME"', declared)
    _plug_in(monkeypatch, acme="acme_parsers:ACME")
    assert GatewayConfig(tool_call_parser="acme").tool_call_parser == "acme"
    text = 'I ask.\nCALL weather {"city": "Bonn"}\nCALL time {}\nnothing else'
    expected = Read("I ask.\nnothing else", calls=[("weather", '{"city": "Bonn"}'), ("time", "{}")])
    assert read(lambda: new_parser(shown(form="acme")), text) == expected
    assert parts_of(lambda: new_parser(shown(form="acme")), [text[:20], text[20:]])[1:3] == [
        CallBegins(0, "weather"),
        CallArguments(0, '{"city": "Bonn"}'),
    ]
    assert json.loads(expected.calls[0][1]) == {"city": "Bonn"}


def test_a_reasoning_parser_of_the_operator(monkeypatch):
    _plug_in(monkeypatch, reasoning_mine=f"{__name__}:MINE")
    assert "mine" in reasoning_parser_names()
    assert "mine" not in tool_parser_names()
    assert reasoning_format("mine").end == "[/THINK]"
    assert GatewayConfig(reasoning_parser="mine").reasoning_parser == "mine"


MINE = factory.ReasoningFormat(lambda inner: inner, "[/THINK]")
NO_FORMAT = HermesParser


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (f"{__name__}:NO_FORMAT", "is type, not ToolFormat"),
        ("no_such_module:A", "cannot be loaded"),
        (f"{__name__}:NOTHING", "cannot be loaded"),
    ],
)
def test_an_entry_point_that_is_no_format_stops_the_start(monkeypatch, value, message):
    _plug_in(monkeypatch, broken=value)
    with pytest.raises(ValueError, match=message):
        GatewayConfig(tool_call_parser="broken")


def test_a_parser_that_is_not_there_stops_the_start_with_the_names_that_are():
    with pytest.raises(ValueError, match="hermes, llama3_json, mistral, pythonic"):
        GatewayConfig(tool_call_parser="hermess")
    with pytest.raises(ValueError, match="deepseek_r1, qwen3"):
        GatewayConfig(reasoning_parser="r1")
    with pytest.raises(ValueError, match="no entry point"):
        tool_format("hermess")


def test_the_operators_own_cannot_take_a_built_in_name(monkeypatch):
    _plug_in(monkeypatch, hermes=f"{__name__}:NO_FORMAT")
    assert tool_parser_names() == ("hermes", "llama3_json", "mistral", "pythonic")
    assert isinstance(tool_format("hermes").new(), HermesParser)
    assert importlib.metadata.entry_points is not factory.entry_points
