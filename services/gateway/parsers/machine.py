"""What parsers of calls have in common: a state machine over text, its content, and one call at a time."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.parsers.base import CallArguments, CallBegins, Part
from services.gateway.parsers.call_object import CallObject
from services.gateway.parsers.json_scan import JsonScanner, skip_blanks
from services.gateway.parsers.prose import Prose, State, find_first, joined


class CallMachine:
    """Base of the parsers of calls. A state takes characters or changes the state; what one returns is never taken back.

    `lead` is what announces a call that is not certain yet (a marker, a separator): content again, with what follows, if none comes.
    """

    def __init__(self, start: State | None = None, *, needs_arguments: bool = False) -> None:
        self._prose = Prose()
        self._needs_arguments = needs_arguments
        self._state: State = start or self._in_prose
        self._after: State = self._in_prose
        self._held = ""
        self._lead: list[str] = []
        self._calls = 0
        self._call = CallObject(0, self._begin_call)
        self._arguments = JsonScanner()

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        out: list[Part] = []
        text, pos = self._held + text, 0
        self._held = ""
        while pos < len(text):
            pos = self._state(text, pos, out)
        return joined(out)

    def finish(self) -> list[Part]:
        """See MessageParser."""
        out: list[Part] = []
        if self._state == self._in_call and not self._call.begun:
            self._lead += self._call.raw or ()
        self._end(out)
        self._prose.finish(out)
        return joined(out)

    def _end(self, out: list[Part]) -> None:
        """Makes content of what is held; formats that hold what is none override it."""
        self._give_up(out)
        self._prose.add(self._held, out)

    def _hold(self, text: str, pos: int) -> int:
        """Keeps the rest of the text, at most a marker's length, for the next push."""
        self._held = text[pos:]
        return len(text)

    def _begin_call(self) -> None:
        self._calls += 1
        self._lead = []
        self._prose.call()

    def _give_up(self, out: list[Part]) -> None:
        """No call has come of what announced one: content."""
        self._prose.add("".join(self._lead), out)
        self._lead = []

    # States

    def _in_prose(self, text: str, pos: int, out: list[Part]) -> int:
        """Content to the end. Formats with markers override it."""
        self._prose.add(text[pos:], out)
        return len(text)

    def _to_marker(self, text: str, pos: int, out: list[Part], states: Mapping[str, State]) -> int:
        """Content up to the first of some markers, each with the state that goes on behind it."""
        at, found = find_first(text, tuple(states), pos)
        self._prose.add(text[pos:at], out)
        if not found:
            return self._hold(text, at)
        self._lead = [found]
        self._state = states[found]
        return at + len(found)

    def _expect_call(self, text: str, pos: int, out: list[Part], after: State) -> int:
        """A call must come, behind blanks; `after` goes on behind it."""
        pos = self._leading_blanks(text, pos)
        if pos < len(text):
            if text[pos] == "{":
                self._start_call(after)
            else:
                self._give_up(out)
                self._state = self._in_prose
        return pos

    def _start_call(self, after: State) -> None:
        """The next character is the `{` of a call."""
        self._call = CallObject(self._calls, self._begin_call, needs_arguments=self._needs_arguments)
        self._state, self._after = self._in_call, after

    def _in_call(self, text: str, pos: int, out: list[Part]) -> int:
        pos = self._call.feed(text, pos, out)
        if self._call.failed:
            self._lead += self._call.raw or ()
            self._give_up(out)
            self._state = self._in_prose
        elif self._call.done:
            self._state = self._after
        return pos

    def _blanks(self, text: str, pos: int, out: list[Part]) -> int:
        """Leaves blanks to the content, which knows whether they are any."""
        end = skip_blanks(text, pos)
        self._prose.add(text[pos:end], out)
        return end

    def _leading_blanks(self, text: str, pos: int) -> int:
        end = skip_blanks(text, pos)
        self._lead.append(text[pos:end])
        return end

    # Arguments whose name stands elsewhere

    def _begin_arguments(self, name: str, out: list[Part]) -> None:
        """Begins a call whose arguments' `{` is the next character."""
        out.append(CallBegins(self._calls, name))
        self._begin_call()
        self._arguments = JsonScanner()
        self._state = self._in_arguments

    def _in_arguments(self, text: str, pos: int, out: list[Part]) -> int:
        taken: list[str] = []
        pos = self._arguments.feed(text, pos, taken)
        if fragment := "".join(taken):
            out.append(CallArguments(self._calls - 1, fragment))
        if self._arguments.failed or self._arguments.done:
            self._state = self._in_prose
        return pos


class ArrayMachine(CallMachine):
    """Base of the parsers of calls in a JSON array."""

    def _in_array(self, text: str, pos: int, out: list[Part]) -> int:
        """Behind `[` or a comma."""
        return self._expect_call(text, pos, out, self._after_item)

    def _after_item(self, text: str, pos: int, out: list[Part]) -> int:
        """A comma and a further call, or the end of the array."""
        pos = self._leading_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == ",":
            self._lead.append(",")
            self._state = self._in_array
            return pos + 1
        self._state = self._in_prose
        if text[pos] == "]":
            self._lead = []
            return pos + 1
        self._give_up(out)
        return pos
