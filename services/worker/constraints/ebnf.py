"""Grammars in EBNF as llama.cpp's GBNF writes it, which vLLM takes too: `root ::= "yes" | [0-9]+ (" " root)?`.

Taken: rules over several lines, `#` comments, literals, classes, `.`, groups, alternatives, `? * + {n} {n,} {n,m}`.
"""

from __future__ import annotations

import re

from services.worker.constraints.base import refused
from services.worker.constraints.expressions import (
    ANY,
    MAX_COUNT,
    Chars,
    Choice,
    Expression,
    Repeat,
    Rule,
    RuleSet,
    Sequence,
    complement,
    normal,
)

MAX_NESTING = 100
_DEFINITION = re.compile(r"([A-Za-z_][\w-]*)[ \t]*::=")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)+")
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "b": 0x08, "0": 0, "a": 0x07}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_ebnf(text: str) -> RuleSet:
    """The rules of a grammar. Raises TokenloomError(INVALID_CONSTRAINT), which names the line."""
    return _Reader(text).rules()


def is_ebnf(text: str) -> bool:
    """Whether a grammar's text defines rules as EBNF does; else it is taken for Lark."""
    return "::=" in text


class _Reader:
    """A recursive descent over one grammar."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def rules(self) -> RuleSet:
        """All rules."""
        found: dict[str, Expression] = {}
        self._skip()
        while self._at < len(self._text):
            head = _DEFINITION.match(self._text, self._at)
            if head is None:
                raise self._error("a rule must begin here, as in: name ::= ...")
            if head[1] in found:
                raise self._error(f"rule {head[1]} is defined a second time")
            self._at = head.end()
            self._skip()
            found[head[1]] = self._choice()
        return RuleSet(found)

    def _choice(self) -> Expression:
        branches = [self._sequence()]
        while self._take("|"):
            self._skip()
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)" and not _DEFINITION.match(self._text, self._at):
            items.append(self._repeated())
            self._skip()
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self) -> Expression:
        item = self._atom()
        while True:
            counts = self._counts()
            if counts is None:
                return item
            item = Repeat(item, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        found = _COUNT.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        least = self._count(found[1])
        most = (self._count(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise self._error(f"a repetition of at least {least} and at most {most}")
        return least, most

    def _count(self, digits: str) -> int:
        if len(digits) > 9 or int(digits) > MAX_COUNT:
            raise refused(f"a repetition asks for {digits[:20]}; at most {MAX_COUNT} are taken")
        return int(digits)

    def _atom(self) -> Expression:
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("("):
            return self._group()
        if self._take("."):
            return Chars(ANY)
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"{self._text[self._at : self._at + 10]!r} is not understood")
        self._at = name.end()
        return Rule(name[0])

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep")
        self._skip()
        found = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("a group without its )")
        return found

    def _literal(self) -> Expression:
        items: list[Expression] = []
        while not self._take('"'):
            code = self._character("a literal without its closing quote")
            items.append(Chars(normal([(code, code)])))
        return Sequence(tuple(items))

    def _class(self) -> Expression:
        negated, pieces = self._take("^"), []
        while not self._take("]"):
            low = high = self._character("a class without its ]")
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._character("a class without its ]")
            if high < low:
                raise self._error("a range of characters from a later to an earlier one")
            pieces.append((low, high))
        ranges = normal(pieces)
        return Chars(complement(ranges) if negated else ranges)

    def _character(self, missing: str) -> int:
        if self._at >= len(self._text) or self._text[self._at] == "\n":
            raise self._error(missing)
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return ord(character)
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[letter]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) or int(digits, 16) > ANY[-1][1]:
                raise self._error(f"\\{letter} needs {_HEX_DIGITS[letter]} hexadecimal digits")
            self._at += len(digits)
            return int(digits, 16)
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        if letter.isalnum() or not letter:
            raise self._error(f"the escape \\{letter} is unknown")
        return ord(letter)

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        if blank:
            self._at = blank.end()

    def _take(self, sign: str) -> bool:
        if self._text.startswith(sign, self._at):
            self._at += len(sign)
            return True
        return False

    def _error(self, what: str) -> Exception:
        return refused(f"the grammar, line {self._text.count(chr(10), 0, self._at) + 1}: {what}")
