"""What the user types, or a pipe brings: lines and messages of several lines."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - its presence is what gives input() editing and history

_PROMPT, _MORE = "> ", "… "
# Opens and closes a message of several lines.
QUOTES = '"""'


class Source:
    """Lines of the user: with editing and history where both ends are a terminal."""

    def __init__(self, console: Console, stdin: TextIO | None = None) -> None:
        self._console, self._in = console, stdin or sys.stdin
        self.interactive = console.is_terminal and self._in.isatty()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While it holds, what is typed does not show: an echo, be it ^C, would move what is being drawn. It is read afterwards."""
        if not self.interactive:
            yield
            return
        before = termios.tcgetattr(self._in)
        silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ECHOCTL), *before[4:]]
        termios.tcsetattr(self._in, termios.TCSADRAIN, silent)
        try:
            yield
        finally:
            termios.tcsetattr(self._in, termios.TCSADRAIN, before)

    def line(self, prompt: str) -> str | None:
        """The next line without its end; None at the end of the input. KeyboardInterrupt passes."""
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                self._console.print()
                return None
        read = self._in.readline()
        return read.rstrip("\n") if read else None

    def message(self) -> str | None:
        """The next message: a line, lines that end in a backslash and the one after them, or all between three quotes and three quotes."""
        line = self.line(_PROMPT)
        if line is None:
            return None
        if line.strip().startswith(QUOTES):
            return self._quoted(line.strip().removeprefix(QUOTES))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self.line(_MORE)
        return "\n".join([*lines, *([line] if line is not None else [])])

    def _quoted(self, line: str | None) -> str:
        """The text up to three quotes at a line's end, or to the end of the input; quotes on lines of their own leave none empty."""
        lines = []
        while line is not None and not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = self.line(_MORE)
        last = [line.rstrip().removesuffix(QUOTES)] if line is not None else []
        return "\n".join([*(lines if any(lines[:1]) else lines[1:]), *(last if any(last) else [])])
