"""Answers on the screen: whole blocks of Markdown stay, nothing of a model's text commands the terminal, programs get the text alone."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cli.answer import Answer, ToolCall, receive
from cli.answer_view import describe_call, harmless, settled_length, view_for

USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}


def chunk(finish_reason=None, **delta) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def arguments(fragment: str) -> dict:
    return chunk(tool_calls=[{"index": 0, "function": {"arguments": fragment}}])


def show(chunks, *, terminal: bool = True, markdown: bool = True, width: int = 80, height: int = 24) -> tuple[str, Answer]:
    """What is written for a stream, and the answer that it is."""
    out, answer = io.StringIO(), Answer()
    console = Console(file=out, force_terminal=terminal, color_system=None, width=width, height=height, highlight=False)
    receive(chunks, answer, view_for(console, markdown=markdown))
    return out.getvalue(), answer


def test_an_answer_is_its_chunks_together():
    clock = iter([10.0, 10.1, 10.5, 10.7, 10.9, 11.0, 11.5]).__next__
    answer = Answer()
    chunks = [chunk(role="assistant", content=""), chunk(reasoning_content="hm"), chunk(content="a"), chunk("stop", content="b")]
    receive([*chunks, {"choices": [], "usage": USAGE}], answer, view_for(Console(file=io.StringIO()), markdown=True), clock)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("hm", "ab", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (5, 4, 1)
    assert answer.first == pytest.approx(0.5)
    assert answer.total == pytest.approx(1.5)
    assert answer.decode_seconds == pytest.approx(1.0)
    assert answer.to_message() == {"role": "assistant", "content": "ab"}


def test_calls_are_put_together_and_shown_readably():
    chunks = [chunk(tool_calls=[CALL]), arguments('{"town": "Pa'), arguments('ris"}'), chunk("tool_calls")]
    out, answer = show(chunks)
    assert '→ weather(town="Paris")' in out
    assert answer.to_message()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Paris"}'}}
    ]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (ToolCall("1", "f", '{"a": 1, "b": [true, "é"]}'), 'f(a=1, b=[true, "é"])'),
        (ToolCall("1", "f", ""), "f()"),
        (ToolCall("1", "f", '{"a": '), 'f({"a": )'),
        (ToolCall("1", "f", "3"), "f(3)"),
    ],
)
def test_a_call_reads_like_one(call, shown):
    assert describe_call(call) == shown


def test_a_program_gets_the_content_alone_and_a_call_as_a_line_of_json():
    out, _ = show([chunk(reasoning="hm"), chunk(content="**a** \x1b[2J\n\nb")], terminal=False)
    assert out == "**a** \x1b[2J\n\nb\n"
    out, _ = show([chunk(content="a\n"), chunk(tool_calls=[CALL]), chunk("tool_calls")], terminal=False)
    assert out.startswith("a\n{")
    assert json.loads(out.splitlines()[1])["function"]["name"] == "weather"


def test_on_a_terminal_no_text_commands_it():
    for markdown in (True, False):
        out, _ = show([chunk(reasoning_content="\x1b[2J"), chunk(content="a\x1b]0;x\x07b")], markdown=markdown)
        assert "a␛]0;x␇b" in out
        assert "\x1b[2J" not in out
        assert "\x1b]0" not in out
    assert harmless("a\tb\nc\x7f\x9b") == "a\tb\nc␡\ufffd"


def test_reasoning_stands_on_lines_of_its_own_before_the_answer():
    out, _ = show([chunk(reasoning_content="first "), chunk(reasoning_content="this"), chunk(content="then")], markdown=False)
    assert "first this" in out
    out, _ = show([chunk(reasoning_content="first this"), chunk(content="then")])
    assert out.index("first this") < out.index("\n") < out.index("then")


@pytest.mark.parametrize(("finish", "word"), [("length", "cut off"), ("stop", ""), ("tool_calls", "")])
def test_only_an_end_that_is_worth_a_word_gets_one(finish, word):
    out, _ = show([chunk(finish, content="a")])
    last = next(line for line in reversed(screen(out)) if line.strip())
    assert last.startswith("[") is bool(word)
    assert word in last


def test_ctrl_c_keeps_what_has_come():
    def chunks():
        yield chunk(content="so ")
        yield chunk(content="far")
        raise KeyboardInterrupt

    out, answer = show(chunks())
    assert (answer.content, answer.stopped) == ("so far", True)
    assert "[stopped]" in out


@pytest.mark.parametrize("markdown", [True, False])
def test_an_error_passes_and_what_has_come_stands_on_the_screen(markdown):
    def chunks():
        yield chunk(content="so far")
        raise ConnectionError("gone")

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=80)
    with pytest.raises(ConnectionError):
        receive(chunks(), Answer(), view_for(console, markdown=markdown))
    assert "so far" in out.getvalue()


LONG = "# Title\n\nSome *words* here.\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n2. two\n\n" + "word " * 300 + "\n\nEnd."


@pytest.mark.parametrize("size", [1, 5, 64, 10_000])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (20, 6)])
def test_markdown_leaves_the_same_on_the_screen_however_it_comes(size, width, height):
    pieces = [chunk(content=LONG[start : start + size]) for start in range(0, len(LONG), size)]
    out, _ = show(pieces, width=width, height=height)
    whole = "".join(line for line in screen(out))
    assert whole.count("Title") == 1
    assert whole.count("x = 1") == 1
    assert whole.count("word") == 301
    assert whole.count("End.") == 1


def screen(written: str) -> list[str]:
    """The lines that stay after Live's own cursor movements (to the line's start, up a line, erase the line)."""
    lines, row, at = [""], 0, 0
    position = 0
    while position < len(written):
        rest = written[position:]
        for code, (up, erase) in {"\x1b[1A": (1, False), "\x1b[2K": (0, True), "\x1b[?25l": (0, False), "\x1b[?25h": (0, False)}.items():
            if rest.startswith(code):
                row = max(row - up, 0)
                lines[row] = "" if erase else lines[row]
                position += len(code)
                break
        else:
            character = rest[0]
            assert character != "\x1b", rest[:10]
            if character == "\n":
                row, at = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif character == "\r":
                at = 0
            else:
                lines[row] = lines[row][:at].ljust(at) + character + lines[row][at + 1 :]
                at += 1
            position += 1
    return lines


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("", ""),
        ("one line", ""),
        ("a paragraph\n", ""),
        ("a\n\n", "a\n\n"),
        ("a\n\nb", "a\n\n"),
        ("\n\nb", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n~~~\n\nx", "~~~\n```\n\n~~~\n\n"),
        ("````\n```\n\nx", ""),
    ],
)
def test_blocks_are_settled_at_a_blank_line_outside_of_code(text, settled):
    assert text[: settled_length(text)] == settled
