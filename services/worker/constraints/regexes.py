"""Regular expressions as clients write them, with the meaning of Python's `re.fullmatch`.

Taken: literals, escapes, classes, `.`, groups (named or not), alternatives, counted and lazy repetitions (laziness changes no language),
`^` `$` `\\A` `\\Z` at the outer ends. `\\d`, `\\w` and `\\s` are ASCII; their complements leave out all that Python's Unicode classes take.
Refused, by name: look-around, back references, word boundaries, anchors inside, flags, atomic groups and possessive repetitions, `\\p`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from services.worker.constraints.base import refused
from services.worker.constraints.expressions import (
    ANY,
    LAST_CHARACTER,
    MAX_COUNT,
    Chars,
    Choice,
    Expression,
    Ranges,
    Repeat,
    RuleSet,
    Sequence,
    complement,
    normal,
)

MAX_NESTING = 100
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = normal([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE: Ranges = normal([(0x09, 0x0D), (0x20, 0x20)])
_DOT = complement(((0x0A, 0x0A),))
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_GROUP_REFUSALS = {
    "=": "look-ahead",
    "!": "look-ahead",
    "<=": "look-behind",
    "<!": "look-behind",
    ">": "an atomic group",
    "#": "a comment",
    "(": "a condition",
    "P=": "a back reference",
}


def read_regex(pattern: str) -> RuleSet:
    """The language of a pattern that the whole text matches. Raises TokenloomError(INVALID_CONSTRAINT)."""
    return RuleSet({"root": _Reader(pattern).whole()})


def read_search(pattern: str) -> Expression:
    """The language of texts in which a pattern is found somewhere, as JSON Schema's `pattern` means it. Raises as read_regex."""
    return _Reader(pattern, search=True).whole()


class _Reader:
    """A recursive descent over one pattern."""

    def __init__(self, pattern: str, *, search: bool = False) -> None:
        self._text, self._at, self._depth, self._search = pattern, 0, 0, search

    def whole(self) -> Expression:
        """The whole pattern."""
        found = self._choice(outer=True)
        if self._at < len(self._text):
            raise self._error("an unmatched )")
        return found

    def _choice(self, *, outer: bool) -> Expression:
        branches = [self._branch(outer=outer)]
        while self._take("|"):
            branches.append(self._branch(outer=outer))
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _branch(self, *, outer: bool) -> Expression:
        items: list[Expression] = []
        anchored = outer and self._start_anchor()
        if outer and self._search and not anchored:
            items.append(Repeat(Chars(ANY), 0, None))
        ended = False
        while self._at < len(self._text) and self._peek() not in "|)":
            if outer and self._end_anchor():
                ended = True
                break
            items.append(self._repeated())
        if ended and self._at < len(self._text) and self._peek() not in "|)":
            raise self._error("an anchor inside")
        if outer and self._search and not ended:
            items.append(Repeat(Chars(ANY), 0, None))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _start_anchor(self) -> bool:
        return self._take("^") or self._take("\\A")

    def _end_anchor(self) -> bool:
        return self._take("$") or self._take("\\Z") or self._take("\\z")

    def _repeated(self) -> Expression:
        item = self._atom()
        counts = self._counts()
        if counts is None:
            return item
        least, most = counts
        if most is not None and most < least:
            raise self._error(f"a repetition of at least {least} and at most {most}")
        self._take("?")
        if self._take("+"):
            raise self._error("a possessive repetition")
        if self._counts() is not None:
            raise self._error("a repetition of a repetition")
        return Repeat(item, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not (low + high).isdecimal() or not (low + high).isascii():
            return None  # as in Python: a brace that counts nothing is a brace
        self._at = end + 1
        least = self._count(low) if low else 0
        return least, (self._count(high) if high else None) if comma else least

    def _count(self, digits: str) -> int:
        if len(digits) > 9 or int(digits) > MAX_COUNT:
            raise refused(f"a repetition asks for {digits[:20]}; at most {MAX_COUNT} are taken")
        return int(digits)

    def _atom(self) -> Expression:
        character = self._next()
        match character:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(_DOT)
            case "\\":
                return Chars(self._escape(inside=False))
            case "^" | "$":
                raise self._error(f"an anchor inside ({character})")
            case "*" | "+" | "?":
                raise self._error("a repetition of nothing")
        return Chars(((ord(character), ord(character)),))

    def _group(self) -> Expression:
        if self._take("?"):
            self._named_or_plain()
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise refused(f"the regular expression is nested more than {MAX_NESTING} deep")
        found = self._choice(outer=False)
        self._depth -= 1
        if not self._take(")"):
            raise self._error("a group without its )")
        return found

    def _named_or_plain(self) -> None:
        if self._take(":"):
            return
        for sign, name in _GROUP_REFUSALS.items():
            if self._text.startswith(sign, self._at):
                raise self._error(name)
        if self._take("P<") or self._take("<"):
            end = self._text.find(">", self._at)
            if end > self._at and self._text[self._at : end].isidentifier():
                self._at = end + 1
                return
            raise self._error("a group's name")
        raise self._error("flags")

    def _class(self) -> Ranges:
        negated = self._take("^")
        pieces: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) != 1 or low[0][0] != low[0][1] or len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._error("a range of characters from a later to an earlier one, or of classes")
                low = ((low[0][0], high[0][0]),)
            pieces.extend(low)
        self._at += 1
        found = normal(pieces)
        return complement(found) if negated else found

    def _member(self) -> Ranges:
        character = self._next(" (a class without its ])")
        if character == "\\":
            return self._escape(inside=True)
        if character == "[" and self._peek() == ":":
            raise self._error("a POSIX class")
        return ((ord(character), ord(character)),)

    def _escape(self, *, inside: bool) -> Ranges:
        letter = self._next(" (an escape of nothing)")
        if letter in _CLASSES:
            return _CLASSES[letter]()
        if letter in _CONTROLS or (letter == "b" and inside):
            code = _CONTROLS.get(letter, 0x08)
        elif letter in _HEX_DIGITS:
            code = self._hexadecimal(_HEX_DIGITS[letter])
        elif letter == "0" and not self._peek().isdecimal():
            code = 0
        elif letter.isascii() and letter.isalnum():
            names = {"b": "a word boundary", "B": "a word boundary", "p": "a Unicode property", "P": "a Unicode property"}
            anchors = dict.fromkeys("AZz", "an anchor inside")
            default = "a back reference" if letter.isdecimal() else f"the escape \\{letter}"
            raise self._error({**names, **anchors}.get(letter, default))
        else:
            code = ord(letter)
        return ((code, code),)

    def _hexadecimal(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        if len(text) < digits or any(digit not in "0123456789abcdefABCDEF" for digit in text) or int(text, 16) > LAST_CHARACTER:
            raise self._error(f"an escape that needs {digits} hexadecimal digits")
        self._at += digits
        return int(text, 16)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self, what: str = "") -> str:
        if self._at >= len(self._text):
            raise refused(f"the regular expression ends too early{what}")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, sign: str) -> bool:
        if self._text.startswith(sign, self._at):
            self._at += len(sign)
            return True
        return False

    def _error(self, what: str) -> Exception:
        return refused(f"the regular expression holds {what} at character {self._at}, which is not supported")


@functools.cache
def _not_in_python(kind: str) -> Ranges:
    """All characters outside one of Python's Unicode classes."""
    tests: dict[str, Callable[[str], bool]] = {
        "d": str.isdecimal,
        "s": str.isspace,
        "w": lambda character: character.isalnum() or character == "_",
    }
    outside, test, start = [], tests[kind], -1
    for code in range(sys.maxunicode + 2):
        free = code <= sys.maxunicode and not test(chr(code))
        if free and start < 0:
            start = code
        elif not free and start >= 0:
            outside.append((start, code - 1))
            start = -1
    return normal(outside)


_CLASSES: dict[str, Callable[[], Ranges]] = {
    "d": lambda: _DIGITS,
    "w": lambda: _WORD,
    "s": lambda: _SPACE,
    "D": lambda: _not_in_python("d"),
    "W": lambda: _not_in_python("w"),
    "S": lambda: _not_in_python("s"),
}
