"""Grammars as rules of expressions over characters: what regular expressions, choices and EBNF are read into before a backend sees them.

One reading for all backends: what is refused, and what an expression means, does not depend on which of them compiles it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.worker.constraints.base import refused

LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

# Characters, references and repetitions of a grammar with its counted repetitions written out.
MAX_SIZE = 60_000
# Characters of all texts of a choice.
MAX_CHOICE_SIZE = 200_000
# Most that a counted repetition may ask for.
MAX_COUNT = 16_384

Ranges = tuple[tuple[int, int], ...]


# Every character that UTF-8 has.
ANY: Ranges = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, LAST_CHARACTER))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of ranges of code points, both ends included, in rising order and apart from each other."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; of nothing, the empty text."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of them."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """At least `least` and at most `most` (None: any number) times."""

    item: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule by its name."""

    name: str


Expression = Chars | Sequence | Choice | Repeat | Rule


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules by name, and the one that a whole output matches."""

    rules: Mapping[str, Expression]
    root: str = "root"


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in rising order, joined where they touch, without surrogates (no UTF-8 has them)."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(piece for item in ranges for piece in _without_surrogates(item)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _without_surrogates(piece: tuple[int, int]) -> Iterator[tuple[int, int]]:
    low, high = piece
    if low < _SURROGATES[0]:
        yield low, min(high, _SURROGATES[0] - 1)
    if high > _SURROGATES[1]:
        yield max(low, _SURROGATES[1] + 1), high


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`."""
    pieces, start = [], 0
    for low, high in ranges:
        if low > start:
            pieces.append((start, low - 1))
        start = high + 1
    if start <= LAST_CHARACTER:
        pieces.append((start, LAST_CHARACTER))
    return normal(pieces)


def minus(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of `ranges` that are not in `others`."""
    kept = complement(others)
    return normal((max(a, c), min(b, d)) for a, b in ranges for c, d in kept if max(a, c) <= min(b, d))


def literal(text: str) -> Sequence:
    """A text as it stands. Raises TokenloomError(INVALID_CONSTRAINT) for a lone surrogate, which no output can spell."""
    if any(_SURROGATES[0] <= ord(character) <= _SURROGATES[1] for character in text):
        raise refused(f"{text!r} holds half a surrogate pair")
    return Sequence(tuple(Chars(((ord(character), ord(character)),)) for character in text))


def one_of(texts: Iterable[str]) -> Expression:
    """Exactly one of some texts. Raises TokenloomError(INVALID_CONSTRAINT) when there are none, or too many."""
    listed = list(texts)
    if not listed:
        raise refused("there is nothing to choose from")
    if sum(map(len, listed)) > MAX_CHOICE_SIZE:
        raise refused(f"the texts to choose from have more than {MAX_CHOICE_SIZE} characters")
    return Choice(tuple(literal(text) for text in listed))


def check(rules: RuleSet, limit: int = MAX_SIZE) -> None:
    """Refuses rules that no text or no finite text satisfies, that are not there, or that are too big.

    Raises TokenloomError(INVALID_CONSTRAINT), which names the rule.
    """
    for name, expression in rules.rules.items():
        for reference in _references(expression):
            if reference not in rules.rules:
                raise refused(f"rule {name} refers to {reference}, which is not defined")
    if rules.root not in rules.rules:
        raise refused(f"the grammar has no rule {rules.root}")
    if sum(size(expression) for expression in rules.rules.values()) > limit:
        raise refused(f"the expression is too big: with its repetitions written out it has more than {limit} parts")
    finite = finite_rules(rules)
    if rules.root not in finite:
        raise refused(f"no finite text satisfies the grammar: rule {_culprit(rules, finite)} needs itself, or nothing at all matches it")


def size(expression: Expression) -> int:
    """Parts of an expression with counted repetitions written out. Raises TokenloomError(INVALID_CONSTRAINT) beyond MAX_COUNT."""
    match expression:
        case Chars() | Rule():
            return 1
        case Sequence(items) | Choice(items):
            return 1 + sum(map(size, items))
        case Repeat(item, least, most):
            count = max(least, most or 0)
            if count > MAX_COUNT:
                raise refused(f"a repetition asks for {count}; at most {MAX_COUNT} are taken")
            return size(item) * max(count, 1)


def parts(expression: Expression) -> tuple[Expression, ...]:
    """What an expression is made of."""
    match expression:
        case Sequence(items) | Choice(items):
            return items
        case Repeat(item, _, _):
            return (item,)
        case _:
            return ()


def _references(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Rule):
        yield expression.name
    for item in parts(expression):
        yield from _references(item)


def finite_rules(rules: RuleSet, known: Collection[str] | None = None) -> set[str]:
    """The rules that some finite text satisfies: the least fixed point. A name that is not in `known` counts as satisfied."""
    finite = set() if known is None else {name for rule in rules.rules.values() for name in _references(rule) if name not in known}
    while True:
        more = {name for name, expression in rules.rules.items() if name not in finite and _finite(expression, finite)}
        if not more:
            return finite
        finite |= more


def _finite(expression: Expression, rules: set[str]) -> bool:
    match expression:
        case Chars(ranges):
            return bool(ranges)
        case Rule(name):
            return name in rules
        case Sequence(items):
            return all(_finite(item, rules) for item in items)
        case Choice(items):
            return any(_finite(item, rules) for item in items)
        case Repeat(item, least, most):
            return not least or ((most is None or most >= least) and _finite(item, rules))


def _culprit(rules: RuleSet, finite: set[str]) -> str:
    """A rule without an end that stands deepest among those that the root needs."""
    name, seen = rules.root, {rules.root}
    while further := [item for item in _references(rules.rules[name]) if item not in finite and item not in seen]:
        name = further[0]
        seen.add(name)
    return name


def expanded_size(rules: RuleSet) -> int | None:
    """The size of the root with all references written out; None: it is recursive, and has none."""
    sizes: dict[str, int | None] = {}

    def of_rule(name: str) -> int | None:
        if name not in sizes:
            sizes[name] = None  # met again before it is known, it stands within itself
            sizes[name] = of(rules.rules[name])
        return sizes[name]

    def of(expression: Expression) -> int | None:
        match expression:
            case Rule(name):
                return of_rule(name)
            case Repeat(item, least, most):
                inner = of(item)
                return None if inner is None else inner * max(least, most or 1, 1)
            case _:
                found = [of(item) for item in parts(expression)]
                return None if None in found else 1 + sum(size for size in found if size is not None)

    return of_rule(rules.root)


def expanded(rules: RuleSet) -> Expression:
    """The root with all references written out, for rules without recursion."""

    def expand(expression: Expression) -> Expression:
        match expression:
            case Rule(name):
                return expand(rules.rules[name])
            case Sequence(items):
                return Sequence(tuple(map(expand, items)))
            case Choice(items):
                return Choice(tuple(map(expand, items)))
            case Repeat(item, least, most):
                return Repeat(expand(item), least, most)
            case _:
                return expression

    return expand(Rule(rules.root))
