"""Lark grammars, which backends read by themselves: only whether some finite text satisfies one is looked at here.

What this reading does not understand (directives, special tokens, nested grammars) counts as satisfied: then nothing is refused.
"""

from __future__ import annotations

import re

from services.worker.constraints.base import refused
from services.worker.constraints.expressions import ANY, Chars, Choice, Expression, Repeat, Rule, RuleSet, Sequence, finite_rules

_DEFINITION = re.compile(r"^[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(.*(?:\n(?:[ \t|].*)?)*)", re.MULTILINE)
_TOKEN = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\}|[A-Za-z_]\w*|[()\[\]|*+?]|\S'
)
_SOMETHING = Chars(ANY)


def check_lark(text: str) -> None:
    """Raises TokenloomError(INVALID_CONSTRAINT) when no finite text satisfies the rule `start`."""
    rules = {found[1]: _Reader(_TOKEN.findall(found[2])).choice() for found in _DEFINITION.finditer(text)}
    if "start" in rules and "start" not in finite_rules(RuleSet(rules, "start"), known=rules.keys()):
        raise refused("no finite text satisfies the grammar: start needs itself")


class _Reader:
    """A recursive descent over the tokens of one rule."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [token for token in tokens if not token.startswith("//")]

    def choice(self) -> Expression:
        """Alternatives up to a closing bracket or the end."""
        branches = [self._sequence()]
        while self._tokens and self._tokens[0] == "|":
            self._tokens.pop(0)
            branches.append(self._sequence())
        return Choice(tuple(branches))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while self._tokens and self._tokens[0] not in ("|", ")", "]"):
            items.append(self._item(self._tokens.pop(0)))
            while self._tokens and (self._tokens[0] in ("*", "+", "?") or self._tokens[0][0] in "~{"):
                sign = self._tokens.pop(0)
                least = 0 if sign in ("*", "?") else 1 if sign == "+" else int((re.findall(r"\d+", sign) or ["0"])[0])
                items.append(Repeat(items.pop(), min(least, 1), None))
        return Sequence(tuple(items))

    def _item(self, token: str) -> Expression:
        if token in ("(", "["):
            inner = self.choice()
            if self._tokens:
                self._tokens.pop(0)
            return inner if token == "(" else Repeat(inner, 0, 1)
        return Rule(token) if token[0].isalpha() or token[0] == "_" else _SOMETHING
