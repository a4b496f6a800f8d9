"""Markdown on the screen: nothing of a model's text but its markup is missing, however much it looks like markup."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cli.markdown import ShownMarkdown

# Of each pair none begins or makes markup, alone or beside another.
HTML = ("<b>", "</b>", "<div>", "<br/>", "<!--c-->", "List<String>", "vector<std::string>", "x<y")
WORDS = ("a", "word", "https://x.y/?q=1", "(c)", "#1", "[1]:", *HTML)


def drawn(text: str, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    with console.capture() as capture:
        console.print(ShownMarkdown(text))
    return capture.get()


def letters(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), min_size=1, max_size=6), st.sampled_from([12, 80]))
def test_every_character_that_is_no_markup_is_on_the_screen(words, width):
    text = "\n".join(" ".join(line) for line in words)
    assert letters(drawn(text, width)) == letters(text)
    if width == 80:
        assert [line.split() for line in drawn(text).splitlines()] == [" ".join(line).split() for line in words], "each line is a line"


@pytest.mark.parametrize(
    "text",
    [
        "[the docs](https://x.y/__init__/ü*b*)",
        '[a](b "title")',
        "![a picture](one.png)",
        "[![in](a.png)](b)",
        "[1]: https://x.y",
        "<script>alert(1)</script>",
    ],
)
def test_what_a_terminal_cannot_draw_is_shown_as_it_was_written(text):
    assert letters(drawn(text)) == letters(text)


def test_no_address_is_hidden_behind_a_text():
    assert "\x1b]8" not in drawn("[here](https://x.y)")


def test_markup_is_still_drawn():
    assert letters(drawn("# T\n\n**a** *b* ~~c~~ `<d>`\n\n- e\n- f")) == "Tabc<d>•e•f"


@pytest.mark.parametrize("width", [20, 80])
def test_a_table_loses_no_cell_and_no_end_of_one(width):
    wide = "|a|b|\n|-|-|\n|1|" + "x" * 100 + "|"
    assert drawn(wide, width).count("x") == 100
    assert "3" in drawn("|a|b|\n|-|-|\n|1|2|3|", width), "more cells than the head has"
    many = "|" + "c|" * 30 + "\n|" + "-|" * 30 + "\n|" + "d|" * 30
    assert (drawn(many, width).count("c"), drawn(many, width).count("d")) == (30, 30)
