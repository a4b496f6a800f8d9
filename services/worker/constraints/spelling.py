"""Expressions in the notations that backends take: one regular expression, Lark, and EBNF."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.constraints.expressions import Chars, Choice, Expression, Ranges, Repeat, Rule, RuleSet, Sequence

_PLAIN = frozenset(map(ord, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _"))


def regex_of(expression: Expression) -> str:
    """A regular expression in the syntax of Rust's `regex`, for an expression without references."""
    match expression:
        case Chars(ranges):
            return _rust_class(ranges)
        case Sequence(items):
            return "".join(map(regex_of, items)) or "(?:)"
        case Choice(items):
            return f"(?:{'|'.join(map(regex_of, items))})"
        case Repeat(item, least, most):
            return f"(?:{regex_of(item)}){_counts(least, most)}"
        case Rule(name):
            raise ValueError(f"rule {name} is not written out")


def xgrammar_regex_of(expression: Expression) -> str:
    """A regular expression in xgrammar's syntax, for an expression without references."""
    match expression:
        case Chars(ranges):
            return _class(ranges, lambda code: f"\\u{code:04X}" if code < 0x10000 else f"\\u{{{code:X}}}")
        case Sequence(items):
            return "".join(map(xgrammar_regex_of, items))
        case Choice(items):
            return f"({'|'.join(map(xgrammar_regex_of, items))})"
        case Repeat(item, least, most):
            return f"({xgrammar_regex_of(item)}){_counts(least, most)}"
        case Rule(name):
            raise ValueError(f"rule {name} is not written out")


def lark_of(rules: RuleSet) -> str:
    """A whole grammar in Lark."""
    return "\n".join(lark_rules(rules, "start"))


def lark_rules(rules: RuleSet, root: str) -> list[str]:
    """Lark in which every terminal is one character: a longer one would be matched greedily, which changes what a grammar means.

    The root rule is named `root`, the others by its name and a number.
    """
    names = {name: f"{root}_{index}" for index, name in enumerate(rules.rules)} | {rules.root: root}

    def spell(expression: Expression) -> str:
        match expression:
            case Chars(ranges):
                return f"/{_rust_class(ranges)}/"
            case Sequence(items):
                return f"({' '.join(map(spell, items))})" if items else '""'
            case Choice(items):
                return f"({' | '.join(map(spell, items))})"
            case Repeat(item, least, most):
                return f"({spell(item)}){_counts(least, most)}"
            case Rule(name):
                return names[name]

    return [f"{names[name]}: {spell(expression)}" for name, expression in rules.rules.items()]


def ebnf_of(rules: RuleSet, prefix: str = "rule") -> str:
    """EBNF with the root named `root`."""
    names = {name: f"{prefix}_{index}" for index, name in enumerate(rules.rules)} | {rules.root: "root"}

    def spell(expression: Expression) -> str:
        match expression:
            case Chars(ranges):
                return _ebnf_class(ranges)
            case Sequence(items):
                return f"({' '.join(map(spell, items))})" if items else '""'
            case Choice(items):
                return f"({' | '.join(map(spell, items))})"
            case Repeat(item, least, most):
                return f"({spell(item)}){_counts(least, most)}"
            case Rule(name):
                return names[name]

    return "\n".join(f"{names[name]} ::= {spell(expression)}" for name, expression in rules.rules.items())


def _counts(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or (f"{{{least},}}" if most is None else f"{{{least},{most}}}")


def _rust_class(ranges: Ranges) -> str:
    return _class(ranges, lambda code: f"\\x{{{code:X}}}")


def _ebnf_class(ranges: Ranges) -> str:
    return _class(ranges, lambda code: f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")


def _class(ranges: Ranges, escape: Callable[[int], str]) -> str:
    def spell(code: int) -> str:
        return chr(code) if code in _PLAIN else escape(code)

    return f"[{''.join(spell(low) if low == high else f'{spell(low)}-{spell(high)}' for low, high in ranges)}]"
