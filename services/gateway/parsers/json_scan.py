"""A JSON text recognised as it comes: where a value ends, and where it stops being JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Deeper nesting is no call that anybody meant, and readers of JSON have bounds of their own (Python's is near 1,000).
MAX_DEPTH = 128

BLANKS = " \t\n\r"
_BLANK_RUN = re.compile(r"[ \t\n\r]*")
_PLAIN_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGIT_RUN = re.compile(r"[0-9]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {"t": "true", "f": "false", "n": "null"}
# Each place in a number, what may follow it, and whether the number may end there. 9 stands for every digit.
_NUMBER: Mapping[str, Mapping[str, str]] = {
    "minus": {"0": "zero", "9": "whole"},
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": {"0": "whole", "9": "whole", ".": "point", "e": "e", "E": "e"},
    "point": {"0": "fraction", "9": "fraction"},
    "fraction": {"0": "fraction", "9": "fraction", "e": "e", "E": "e"},
    "e": {"+": "sign", "-": "sign", "0": "exponent", "9": "exponent"},
    "sign": {"0": "exponent", "9": "exponent"},
    "exponent": {"0": "exponent", "9": "exponent"},
}
_NUMBER_MAY_END = frozenset({"zero", "whole", "fraction", "exponent"})


def skip_blanks(text: str, pos: int) -> int:
    """The position of the first character from `pos` on that is no blank of JSON."""
    match = _BLANK_RUN.match(text, pos)
    assert match is not None, "an empty run matches everywhere"
    return match.end()


class JsonScanner:
    """Recognises one JSON value, a piece at a time; linear in its length, however it is cut.

    `done`: the value is complete. `failed`: what came is no JSON, or is nested deeper than MAX_DEPTH. Either is final. A number at the top
    ends with the first character behind it. Control characters within strings, which models write where JSON asks for an escape, are
    taken and escaped in what is given back. An escape is given back whole, and the two of a surrogate pair together: who reads what has
    come so far never sees half a character.
    """

    __slots__ = ("_digits", "_held", "_high", "_number", "_open", "_state", "_word", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []
        self._state = self._value
        self._number = ""
        self._digits = ""
        self._high = False
        self._held = ""
        self._word = ""

    @property
    def begun(self) -> bool:
        """Whether more than blanks has come."""
        return self.done or self.failed or self._state != self._value or not self.at_top

    @property
    def at_top(self) -> bool:
        """Whether no array and no object is open."""
        return not self._open

    @property
    def after_item(self) -> bool:
        """Whether a comma or the end of what is open must follow (a number may go on as well)."""
        return self._state in (self._next, self._rest_of_number) and not self.at_top

    def feed(self, text: str, pos: int, taken: list[str] | None = None) -> int:
        """Takes characters from `pos` on, until the text or the value ends or fails; returns the position behind the last that it took.

        What was taken, which is JSON as far as it goes, is appended to `taken`. Every call brings a list for it, or none does.
        """
        start = pos
        while pos < len(text) and not self.done and not self.failed:
            if self._state == self._string and text[pos] < " ":
                if taken is not None:
                    taken += [self._held + text[start:pos], f"\\u{ord(text[pos]):04x}"]
                self._held, self._high = "", False
                start = pos = pos + 1
                continue
            pos = self._state(text, pos)
        if taken is not None and (self._held or pos > start):
            piece = self._held + text[start:pos]
            certain = len(piece) - self._size_of_open_escape()
            self._held = piece[certain:]
            taken.append(piece[:certain])
        return pos

    def _size_of_open_escape(self) -> int:
        """Characters at the end of what was taken whose meaning is not certain: an escape that goes on, a high surrogate before it."""
        if self.failed or self._state not in (self._string, self._escape, self._hexadecimal):
            return 0
        size = {self._escape: 1, self._hexadecimal: 2 + len(self._digits)}.get(self._state, 0)
        return size + 6 * self._high

    # Each state takes what it can at `pos` and returns where it stopped; one that takes nothing has changed the state, `done` or `failed`.

    def _value(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if char == '"':
            self._state = self._string
        elif char in "{[":
            return self._begin(char, pos)
        elif char in _WORDS:
            self._word, self._state = _WORDS[char][1:], self._rest_of_word
        elif char in "-0123456789":
            self._number = {"-": "minus", "0": "zero"}.get(char, "whole")
            self._state = self._rest_of_number
        else:
            return self._fail(pos)
        return pos + 1

    def _begin(self, char: str, pos: int) -> int:
        if len(self._open) == MAX_DEPTH:
            return self._fail(pos)
        self._open.append(char)
        self._state = self._first_key if char == "{" else self._first_item
        return pos + 1

    def _first_item(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos < len(text):
            if text[pos] == "]":
                return self._close(pos)
            self._state = self._value
        return pos

    def _first_key(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos < len(text) and text[pos] == "}":
            return self._close(pos)
        return self._key(text, pos)

    def _key(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != '"':
            return self._fail(pos)
        self._open.append('"')
        self._state = self._string
        return pos + 1

    def _colon(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != ":":
            return self._fail(pos)
        self._state = self._value
        return pos + 1

    def _next(self, text: str, pos: int) -> int:
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char, container = text[pos], self._open[-1]
        if char == ",":
            self._state = self._key if container == "{" else self._value
            return pos + 1
        return self._close(pos) if char == ("}" if container == "{" else "]") else self._fail(pos)

    def _string(self, text: str, pos: int) -> int:
        match = _PLAIN_RUN.match(text, pos)
        assert match is not None, "an empty run matches everywhere"
        self._high = self._high and match.end() == pos
        pos = match.end()
        if pos == len(text) or text[pos] < " ":
            return pos
        if text[pos] == "\\":
            self._state = self._escape
            return pos + 1
        self._high = False
        if self._open and self._open[-1] == '"':
            self._open.pop()
            self._state = self._colon
        else:
            self._end_value()
        return pos + 1

    def _escape(self, text: str, pos: int) -> int:
        if text[pos] == "u":
            self._digits, self._state = "", self._hexadecimal
        elif text[pos] in _ESCAPED:
            self._high, self._state = False, self._string
        else:
            return self._fail(pos)
        return pos + 1

    def _hexadecimal(self, text: str, pos: int) -> int:
        if text[pos] not in _HEX:
            return self._fail(pos)
        self._digits += text[pos]
        if len(self._digits) == 4:
            self._high = self._digits[0] in "dD" and self._digits[1] in "89abAB"
            self._state = self._string
        return pos + 1

    def _rest_of_word(self, text: str, pos: int) -> int:
        if text[pos] != self._word[0]:
            return self._fail(pos)
        self._word = self._word[1:]
        if not self._word:
            self._end_value()
        return pos + 1

    def _rest_of_number(self, text: str, pos: int) -> int:
        if self._number in ("whole", "fraction", "exponent"):
            match = _DIGIT_RUN.match(text, pos)
            assert match is not None, "an empty run matches everywhere"
            if match.end() > pos:
                return match.end()
        char = text[pos]
        follows = _NUMBER[self._number].get("9" if char in "123456789" else char)
        if follows is not None:
            self._number = follows
            return pos + 1
        if self._number not in _NUMBER_MAY_END:
            return self._fail(pos)
        self._end_value()
        return pos

    def _close(self, pos: int) -> int:
        self._open.pop()
        self._end_value()
        return pos + 1

    def _end_value(self) -> None:
        if self._open:
            self._state = self._next
        else:
            self.done = True

    def _fail(self, pos: int) -> int:
        self.failed = True
        return pos
