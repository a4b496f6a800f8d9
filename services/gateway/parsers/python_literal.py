"""A Python literal turned into JSON as it comes."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping

from services.gateway.parsers.json_scan import JsonScanner, skip_blanks

_PLAIN_RUN = re.compile(r"""[^"'\\]*""")
_WORD_RUN = re.compile(r"[\w.+-]*")
# Longer words are no literal that anybody meant, and longer names no character's.
_MAX_WORD = 512
_MAX_ESCAPE = 128
_NAMES: Mapping[str, str] = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?(0(_?0)*|[1-9](_?[0-9])*|0[xX](_?[0-9a-fA-F])+|0[oO](_?[0-7])+|0[bB](_?[01])+)")
_FLOAT = re.compile(r"(?=.*[.eE])[+-]?([0-9](_?[0-9])*\.?([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][+-]?[0-9](_?[0-9])*)?")
_SIMPLE: Mapping[str, str] = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
# Characters of an escape in hexadecimal, the backslash and the letter among them.
_HEXADECIMAL: Mapping[str, int] = {"x": 4, "u": 6, "U": 10}
_OCTAL = "01234567"


class PythonLiteral:
    """Reads one literal (string, number, True, False, None, list, dict of string keys; JSON's own words too) and gives JSON.

    `done` and `failed` are final. What is given has passed a JsonScanner: where a literal's punctuation is none of JSON's (a trailing
    comma) it is set right, where it is wrong the literal fails. A number or a word ends with the first character behind it. Newlines in any
    string are taken, as JSON's are.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._json = JsonScanner()
        self._state = self._between
        self._comma = False
        self._word: list[str] = []
        self._size = 0
        self._quote = ""
        self._quotes = 0
        self._triple = False
        self._escape = ""

    def feed(self, text: str, pos: int, taken: list[str]) -> int:
        """Takes characters from `pos` on until the text or the literal ends or fails; returns the position behind the last one taken.

        The JSON of what was taken is appended to `taken`.
        """
        while pos < len(text) and not self.done and not self.failed:
            pos = self._state(text, pos, taken)
        return pos

    def finish(self, taken: list[str]) -> None:
        """The text has ended: a word that waited for what follows is whole."""
        if self._state == self._in_word and (meant := _word_as_json("".join(self._word))) is not None:
            self._give(meant, taken)

    @property
    def held(self) -> str:
        """What was taken and not given: of a literal that failed, where it did."""
        comma = "," if self._comma else ""
        if self._state == self._in_word:
            return comma + "".join(self._word)
        if self._state == self._in_escape:
            return self._escape
        return comma + self._quote * {self._opened: 1, self._opened_twice: 2}.get(self._state, 0)

    def _give(self, piece: str, taken: list[str]) -> None:
        """A piece of JSON, before it the comma that waits; fails where it does not fit."""
        if self._comma and piece not in "]}":
            piece = f", {piece}"
        self._comma = False
        end = self._json.feed(piece, 0, taken)
        self.failed = self._json.failed or end < len(piece)
        self.done = self._json.done

    def _between(self, text: str, pos: int, taken: list[str]) -> int:
        """Blanks, punctuation, and the first character of a string or a word."""
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if char in "\"'":
            self._quote, self._state = char, self._opened
        elif char in "[{]}":
            self._give(char, taken)
        elif char == ":":
            self._give(": ", taken)
        elif char == "," and self._json.after_item and not self._comma:
            self._comma = True
        elif _WORD_RUN.fullmatch(char):
            self._word, self._size, self._state = [], 0, self._in_word
            return pos
        else:
            self.failed = True
        return pos if self.failed else pos + 1

    # Strings

    def _opened(self, text: str, pos: int, taken: list[str]) -> int:
        """Behind a quote: a second one is the end, unless a third follows."""
        if text[pos] == self._quote:
            self._state = self._opened_twice
            return pos + 1
        return self._begin_string(pos, taken, triple=False)

    def _opened_twice(self, text: str, pos: int, taken: list[str]) -> int:
        if text[pos] == self._quote:
            return self._begin_string(pos, taken, triple=True)
        self._give('""', taken)
        if not self.failed:
            self._state = self._between
        return pos

    def _begin_string(self, pos: int, taken: list[str], *, triple: bool) -> int:
        self._give('"', taken)
        if self.failed:
            return pos
        self._triple, self._quotes, self._state = triple, 0, self._in_string
        return pos + 1 if triple else pos

    def _in_string(self, text: str, pos: int, taken: list[str]) -> int:
        found = _PLAIN_RUN.match(text, pos)
        assert found is not None, "an empty run matches everywhere"
        if found.end() > pos:
            self._give_quotes(taken)
            self._give_text(found[0], taken)
            return found.end()
        if text[pos] == "\\":
            self._give_quotes(taken)
            self._escape, self._state = "\\", self._in_escape
        elif text[pos] != self._quote:
            self._give_quotes(taken)
            self._give_text(text[pos], taken)
        else:
            self._quotes += 1
            if self._quotes == (3 if self._triple else 1):
                self._give('"', taken)
                self._state = self._between
        return pos + 1

    def _give_quotes(self, taken: list[str]) -> None:
        """One or two quotes within three are text."""
        if self._quotes:
            self._give_text(self._quote * self._quotes, taken)
            self._quotes = 0

    def _give_text(self, text: str, taken: list[str]) -> None:
        lone = "\ud800" <= text <= "\udfff" and len(text) == 1
        self._give(json.dumps(text, ensure_ascii=lone)[1:-1], taken)

    def _in_escape(self, text: str, pos: int, taken: list[str]) -> int:
        char, begun = text[pos], self._escape[1:2]
        if begun in _OCTAL and begun and (char not in _OCTAL or len(self._escape) == 4):
            return self._end_escape(chr(int(self._escape[1:], 8)), pos, taken)
        self._escape += char
        letter = self._escape[1]
        if letter in _SIMPLE:
            return self._end_escape(_SIMPLE[letter], pos + 1, taken)
        if letter in _HEXADECIMAL:
            return self._end_hexadecimal(_HEXADECIMAL[letter], pos + 1, taken)
        if letter == "N":
            return self._end_name(pos + 1, taken)
        if letter not in _OCTAL:  # none of Python's escapes: the backslash is text
            return self._end_escape(self._escape, pos + 1, taken)
        return pos + 1

    def _end_escape(self, meant: str, pos: int, taken: list[str]) -> int:
        self._give_text(meant, taken)
        self._state = self._in_string
        return pos

    def _end_hexadecimal(self, size: int, pos: int, taken: list[str]) -> int:
        digits = self._escape[2:]
        if digits and digits[-1] not in "0123456789abcdefABCDEF":
            self.failed = True
        elif len(self._escape) == size:
            code = int(digits, 16)
            if code <= 0x10FFFF:
                return self._end_escape(chr(code), pos, taken)
            self.failed = True
        return pos

    def _end_name(self, pos: int, taken: list[str]) -> int:
        if self._escape.endswith("}"):
            try:
                return self._end_escape(unicodedata.lookup(self._escape[3:-1]), pos, taken)
            except KeyError:
                self.failed = True
        elif len(self._escape) > _MAX_ESCAPE or (len(self._escape) == 3 and self._escape[2] != "{"):
            self.failed = True
        return pos

    # Numbers and names

    def _in_word(self, text: str, pos: int, taken: list[str]) -> int:
        found = _WORD_RUN.match(text, pos)
        assert found is not None, "an empty run matches everywhere"
        end = min(found.end(), pos + _MAX_WORD + 1 - self._size)
        self._word.append(text[pos:end])
        self._size += end - pos
        if self._size > _MAX_WORD:
            self.failed = True
        elif end < len(text):
            meant = _word_as_json("".join(self._word))
            self.failed = meant is None
            if meant is not None:
                self._give(meant, taken)
            if not self.failed:
                # A number of JSON's ends with what follows it, so that at the top it is known to be whole only here.
                self._state, self.done = self._between, self._json.at_top
        return end


def _word_as_json(word: str) -> str | None:
    """None when it is no literal."""
    if word in _NAMES or _JSON_NUMBER.fullmatch(word):
        return _NAMES.get(word, word)
    if _INTEGER.fullmatch(word):
        return str(int(word, 0))
    if _FLOAT.fullmatch(word):
        number = float(word)
        return None if number in (float("inf"), float("-inf")) else json.dumps(number)
    return None
