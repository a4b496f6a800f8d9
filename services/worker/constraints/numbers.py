"""Numbers between bounds, exactly: both libraries write some ranges wrong, so neither is told of one that it does not keep to.

A range has both ends inside and at most so many decimals. What lies between an excluded bound and the nearest number of that many decimals,
or so far out that few digits do not reach it, is left out: what is allowed always keeps to the bounds, also when it is read as a float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from services.worker.constraints.base import refused
from services.worker.constraints.expressions import Chars, Choice, Expression, Repeat, Sequence, literal

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# A float64 tells decimals of so many digits apart.
_DIGITS = 15
# Decimals beyond those of the bounds, and all of them; for llguidance, which reads more than 18 as none.
_FINER, _MAX_PLACES, _PLACES_OF_LLGUIDANCE = 6, 40, 15
_LARGEST = 10**40 - 1
# Up to here every integer is a float64.
_EXACT = 2**53
# The largest float64 below 2**63: llguidance keeps the whole part of a bound in 64 bits.
_LARGEST_OF_64_BITS = 2**63 - 1024
# What llguidance keeps of a multipleOf has 32 bits.
_LARGEST_FACTOR = 2**32 - 1
_DIGIT = Chars(((0x30, 0x39),))


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers low / 10**places to high / 10**places, both ends included; None: any. Integers have 0 places."""

    low: int | None
    high: int | None
    places: int

    @property
    def empty(self) -> bool:
        """Whether no number lies within."""
        return self.low is not None and self.high is not None and self.low > self.high


def check_bounds(place: str, node: dict[str, Any]) -> None:
    """Refuses bounds that are no numbers. Raises TokenloomError(INVALID_CONSTRAINT) that names the place."""
    for keyword in (*BOUNDS, "multipleOf"):
        value = node.get(keyword, 1)
        if isinstance(value, bool):
            raise refused(f"{place}/{keyword} is a number, not a truth value as before JSON Schema's draft 6")
        if not isinstance(value, int | float):
            raise refused(f"{place}/{keyword} is a number, not {str(value)[:40]!r}")
        if value != value or value in (float("inf"), float("-inf")):
            raise refused(f"{place}/{keyword} is a finite number")
        if keyword == "multipleOf" and value <= 0:
            raise refused(f"{place}/multipleOf is greater than 0")


def is_bounded(node: dict[str, Any]) -> bool:
    """Whether a schema bounds numbers."""
    return any(keyword in node for keyword in BOUNDS)


def span_of(place: str, node: dict[str, Any], *, integers: bool, max_places: int = _MAX_PLACES) -> Span:
    """The numbers within a schema's bounds. Raises TokenloomError(INVALID_CONSTRAINT) when none is left."""
    lows = [(_exact(node[name]), name == "exclusiveMinimum") for name in ("minimum", "exclusiveMinimum") if name in node]
    highs = [(-_exact(node[name]), name == "exclusiveMaximum") for name in ("maximum", "exclusiveMaximum") if name in node]
    places = 0 if integers else min(max_places, _FINER + max(_places(end) for end, _ in (*lows, *highs)))
    farthest = _LARGEST * 10**places
    low = max(_from(*max(lows), places, integers), -farthest) if lows else None
    high = -max(_from(*max(highs), places, integers), -farthest) if highs else None
    span = Span(low, high, places)
    if span.empty or any(abs(end) > farthest for end in (low, high) if end is not None):
        what = "integer of at most 40 digits" if integers else f"number of at most 40 digits and {places} decimals"
        raise refused(f"{place}: no {what} lies within {' and '.join(name for name in BOUNDS if name in node)}")
    return span


def expression_of(span: Span) -> Expression:
    """The texts of the numbers in a span, without exponents."""
    branches: list[Expression] = []
    if span.high is None or span.high >= 0:
        branches.append(_magnitudes(max(span.low or 0, 0), span.high, span.places))
    if span.low is None or span.low < 0:
        nearest = 1 if span.high is None or span.high >= 0 else -span.high
        branches.append(Sequence((literal("-"), _magnitudes(nearest, None if span.low is None else -span.low, span.places))))
    return branches[0] if len(branches) == 1 else Choice(tuple(branches))


def for_llguidance(place: str, node: dict[str, Any]) -> dict[str, Any]:
    """The same schema with bounds that the library keeps to: included, of 64 bits and of float64. Raises as span_of.

    It takes the whole number beside an excluded bound for one within, reads all bounds as float64, and clamps them to 64 bits.
    """
    if "multipleOf" in node and not _keeps_factor(node["multipleOf"]):
        raise refused(f"{place}/multipleOf: llguidance does not keep to {node['multipleOf']}")
    if not is_bounded(node):
        return node
    kept = {name: value for name, value in node.items() if name not in BOUNDS}
    types = [node["type"]] if isinstance(node.get("type"), str) else node.get("type", ["number"])
    if not {"integer", "number"} & set(types):
        return kept
    span = span_of(place, node, integers="number" not in types, max_places=_PLACES_OF_LLGUIDANCE)
    farthest = _LARGEST_OF_64_BITS * 10**span.places
    low = None if span.low is None else _number(max(span.low, -farthest), span.places, up=True)
    high = None if span.high is None else _number(min(span.high, farthest), span.places, up=False)
    if any(abs(end) > _LARGEST_OF_64_BITS for end in (low, high) if end is not None) or (high is None and (low or 0) >= 10**18):
        raise refused(f"{place}: llguidance takes bounds of up to 64 bits; the backend xgrammar takes longer ones")
    if low is not None and high is not None and low > high:
        raise refused(f"{place}: no 64-bit float, as which llguidance reads bounds, lies within these; the backend xgrammar keeps to them")
    return {**kept, **({} if low is None else {"minimum": low}), **({} if high is None else {"maximum": high})}


def _keeps_factor(factor: float) -> bool:
    """Whether the library finds the digits of a factor, which it multiplies as a float64 until it is whole."""
    value, places = float(factor), 0
    while value % 1 and places < _MAX_PLACES:
        value, places = value * 10, places + 1
    scale: int = 10**places
    return value <= _LARGEST_FACTOR and Fraction(value) == _exact(factor) * scale


def _exact(value: float) -> Fraction:
    """What a bound is: of a fraction the decimal that was written, of a large float the integer that it is."""
    return Fraction(value) if isinstance(value, int) or abs(value) >= _EXACT else Fraction(repr(value))


def _places(end: Fraction) -> int:
    """Decimals of an end, as far as they are looked at."""
    return next((places for places in range(_MAX_PLACES) if (end * 10**places).denominator == 1), _MAX_PLACES)


def _from(end: Fraction, excluded: bool, places: int, integers: bool) -> int:
    """The first number from an end on, times 10**places; beyond an excluded one, the first that is another float64 too."""
    scale: int = 10**places
    scaled = end * scale
    first = -(-scaled.numerator // scaled.denominator)
    if not excluded:
        return first
    if integers:
        return first + (first == scaled)
    nearest = -(-abs(scaled).numerator // abs(scaled).denominator)
    step: int = 10 ** max(0, len(str(nearest)) - _DIGITS)
    return first + step


def _number(scaled: int, places: int, *, up: bool) -> int | float:
    """A bound as the library reads it, not further out than it was: a number of few digits stays, a long one becomes a float64."""
    if places == 0 or scaled % 10**places == 0:
        whole = scaled // 10**places
        near = int(float(whole))
        while near < whole if up else near > whole:
            step = 2 ** max(0, abs(near).bit_length() - 53)
            near = int(float(near + step if up else near - step))
        return near
    return float(Fraction(scaled, 10**places))


def _magnitudes(low: int, high: int | None, places: int) -> Expression:
    """Texts of the numbers from low / 10**places on, without a sign."""
    scale = 10**places
    first, last = low // scale, None if high is None else high // scale
    nothing, all_of = "0" * places, "9" * places
    least, most = _fraction_digits(low % scale, places), all_of if high is None else _fraction_digits(high % scale, places)
    if first == last:
        return Sequence((literal(str(first)), _fraction(least, most)))
    branches: list[Expression] = []
    begin, end = first, last
    if least != nothing:
        branches.append(Sequence((literal(str(first)), _fraction(least, all_of))))
        begin = first + 1
    if last is not None and most != all_of:
        branches.append(Sequence((literal(str(last)), _fraction(nothing, most))))
        end = last - 1
    if end is None or begin <= end:
        branches.append(Sequence((_wholes(begin, end), _fraction(nothing, all_of))))
    return branches[0] if len(branches) == 1 else Choice(tuple(branches))


def _fraction_digits(value: int, places: int) -> str:
    return str(value).zfill(places) if places else ""


def _wholes(low: int, high: int | None) -> Expression:
    """Texts of the integers from `low`, which is at least 0, to `high`."""
    longest = len(str(low if high is None else high))
    branches: list[Expression] = []
    for length in range(len(str(low)), longest + 1):
        shortest = 10 ** (length - 1) if length > 1 else 0
        least, most = max(low, shortest), 10**length - 1 if high is None else min(high, 10**length - 1)
        branches.append(_digits(str(least), str(most), exact=True))
    if high is None:
        branches.append(Sequence((Chars(((0x31, 0x39),)), Repeat(_DIGIT, longest, _DIGITS_OF_OPEN))))
    return branches[0] if len(branches) == 1 else Choice(tuple(branches))


# A range that is open above ends too: a model that likes digits does not write them for ever.
_DIGITS_OF_OPEN = 60


def _fraction(least: str, most: str) -> Expression:
    """Texts of fractions with their point, between two of the same number of digits; none where 0 lies within."""
    if not most:
        return Sequence(())
    written = Sequence((literal("."), _digits(least, most, exact=False, some=True)))
    return written if int(least) else Repeat(written, 0, 1)


def _digits(least: str, most: str, *, exact: bool, some: bool = False) -> Expression:
    """Digits between two texts of the same length: of that length, or followed in thought by zeros (but `some` at all)."""
    length = len(least)
    if not length:
        return Sequence(())
    if least == "0" * length and most == "9" * length:
        return Repeat(_DIGIT, length if exact else int(some), length)
    nothing, all_of = "0" * (length - 1), "9" * (length - 1)
    branches: list[Expression] = [Sequence(())] if not exact and not some and not int(least) else []
    first, last = int(least[0]), int(most[0])
    if first == last:
        branches.append(Sequence((literal(least[0]), _digits(least[1:], most[1:], exact=exact))))
    else:
        if least[1:] != nothing:
            branches.append(Sequence((literal(least[0]), _digits(least[1:], all_of, exact=exact))))
            first += 1
        if most[1:] != all_of:
            branches.append(Sequence((literal(most[0]), _digits(nothing, most[1:], exact=exact))))
            last -= 1
        if first <= last:
            some_digit = Chars(((0x30 + first, 0x30 + last),))
            branches.append(Sequence((some_digit, Repeat(_DIGIT, length - 1 if exact else 0, length - 1) if length > 1 else Sequence(()))))
    return branches[0] if len(branches) == 1 else Choice(tuple(branches))
