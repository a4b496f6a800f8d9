"""An answer on the screen while it comes: as Markdown on a terminal, as it is everywhere else."""

from __future__ import annotations

import json
import re
import time
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from cli.answer import Answer, ToolCall, View
from cli.markdown import ShownMarkdown

# What a terminal would obey: all control characters but line break and tab. A model's text must not move the cursor.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# Columns: longer lines are hard to read.
_MAX_WIDTH = 100
# A block is drawn anew with each piece of text, unless drawing would take more of the time than one part in so many.
_DRAWING_SHARE = 5


def view_for(console: Console, *, markdown: bool) -> View:
    """How answers are shown: a program that reads them gets their text and nothing else."""
    if not console.is_terminal:
        return PipeView(console.file)
    return MarkdownView(console) if markdown else PlainView(console)


def harmless(text: str) -> str:
    """Text whose control characters are shown instead of obeyed."""
    return text.translate(_CONTROLS)


def describe_call(call: ToolCall) -> str:
    """A tool call for people: name(parameter=value, ...)."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in arguments.items())})"


def describe_end(answer: Answer) -> str:
    """What is to be said of how an answer ended; empty where it ended by itself."""
    if answer.stopped:
        return "stopped"
    if answer.finish_reason == "length":
        return "cut off: the token limit or the model's context is reached"
    if answer.calls and not answer.whole_calls:
        return "the call is incomplete, and is not made"
    return ""


class PipeView:
    """For programs: the content as it comes and a line break at its end; a call is a line of JSON. No reasoning."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._last = "\n"

    def reasoning(self, text: str) -> None:
        """See View."""

    def content(self, text: str) -> None:
        """See View."""
        self._out.write(text)
        self._out.flush()
        self._last = text

    def finish(self, answer: Answer) -> None:
        """See View."""
        if not self._last.endswith("\n"):
            self._out.write("\n")
        for call in answer.whole_calls:
            self._out.write(json.dumps(call.to_message(), ensure_ascii=False) + "\n")
        self._out.flush()
        self._last = "\n"


class PlainView:
    """On a terminal, as it comes: reasoning dimmed, calls and what went wrong below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = "\n"

    def reasoning(self, text: str) -> None:
        """See View."""
        self._write(text, "dim italic")

    def content(self, text: str) -> None:
        """See View."""
        self._write(text)

    def finish(self, answer: Answer) -> None:
        """See View."""
        self.end_line()
        print_ending(self._console, answer)

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(harmless(text), style=style), end="", soft_wrap=True)
        self._last = text

    def end_line(self) -> None:
        """Begins a new line unless one has begun."""
        if not self._last.endswith("\n"):
            self._console.print()
        self._last = "\n"


class MarkdownView:
    """On a terminal: reasoning dimmed as it comes, then the content as Markdown.

    Blocks that are complete are printed for good; only the last one is drawn anew as it grows, so that answers longer than the screen
    scroll as any text does.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning = PlainView(console)
        self._open = ""
        self._live: Live | None = None
        self._due = 0.0
        self._begun = False

    def reasoning(self, text: str) -> None:
        """See View."""
        self._reasoning.reasoning(text)

    def content(self, text: str) -> None:
        """See View."""
        if self._live is None:
            self._reasoning.end_line()
            # Drawn by this thread alone: Live's own would write its lines between those of finished blocks.
            self._live = Live(console=self._console, transient=True, vertical_overflow="crop", auto_refresh=False)
            self._live.start()
        self._open += harmless(text)
        settled = settled_length(self._open)
        began = time.monotonic()
        if settled or began >= self._due:
            self._draw(self._live, settled)
            now = time.monotonic()
            self._due = now + (now - began) * _DRAWING_SHARE

    def _draw(self, live: Live, settled: int) -> None:
        finished, self._open = self._open[:settled], self._open[settled:]
        with self._console:  # one write: nothing is seen twice
            self._print_block(finished)
            live.update(self._tail(), refresh=True)

    def _print_block(self, text: str) -> None:
        """Prints Markdown for good, a blank line before it unless it is the first; the library's own blank lines depend on what it is."""
        if not text.strip():
            return
        lines = self._console.render_lines(_markdown(text), pad=False)
        while lines and _is_blank(lines[0]):
            lines.pop(0)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        if self._begun:
            self._console.print()
        self._begun = True
        self._console.print(SegmentLines(lines, new_lines=True), end="")

    def _tail(self) -> RenderableType:
        """The open block, as much of its end as surely fits: what Live crops is the end, which is what one wants to see."""
        lines = self._open.splitlines()
        room = max(self._console.height - 4, 4)
        gap = self._begun and bool(lines)
        if len(lines) <= room // 2 and len(self._open) <= room // 2 * self._console.width:
            return Group(Text(), _markdown(self._open)) if gap else _markdown(self._open)
        wrapped = Text(self._open).wrap(self._console, min(self._console.width, _MAX_WIDTH))
        return Text("\n").join(wrapped[-room:])

    def finish(self, answer: Answer) -> None:
        """See View."""
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
            self._live = None
        self._print_block(self._open)
        self._open = ""
        self._reasoning.end_line()
        print_ending(self._console, answer)


def _markdown(text: str) -> RenderableType:
    return Constrain(ShownMarkdown(text), _MAX_WIDTH)


def _is_blank(line: list[Segment]) -> bool:
    """Whether nothing shows on it, not even a background."""
    return not any(segment.text.strip() or (segment.style is not None and segment.style.bgcolor is not None) for segment in line)


def print_ending(console: Console, answer: Answer) -> None:
    """The calls of an answer, and how it ended where that is worth a word."""
    for call in answer.calls:
        console.print(Text(f"→ {harmless(describe_call(call))}", style="cyan"))
    if end := describe_end(answer):
        console.print(Text(f"[{end}]", style="dim"))


def settled_length(text: str) -> int:
    """Characters at the beginning of Markdown text that nothing which may follow changes: whole blocks, up to the last blank line that is
    in no fenced code.
    """
    settled = offset = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        offset += len(line)
        marker = _FENCE.match(line)
        if fence:
            closes = marker is not None and marker[1].startswith(fence) and not line[marker.end() :].strip()
            fence = "" if closes else fence
        elif marker is not None:
            fence = marker[1]
        elif not line.strip() and line.endswith("\n"):
            settled = offset
    return settled if text[:settled].strip() else 0
