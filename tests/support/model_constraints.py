"""Constraints of the model worker's world: so many output tokens, each a multiple of a number, and then nothing more."""

from __future__ import annotations

from collections.abc import Sequence

from libs.constraints import Constraint, ConstraintKind


def multiples(of: int, length: int, *, begin_after: Sequence[int] = (), param: str = "guided_regex") -> Constraint:
    """An output of `length` multiples of `of` (0 is none); with `begin_after` they come after the first occurrence of these ids."""
    return Constraint(ConstraintKind.REGEX, (f"{of}x{length}",), tuple(begin_after), param=param)


def _rule(constraint: Constraint) -> tuple[int, int]:
    of, length = constraint.text.split("x")
    return int(of), int(length)


def _held(constraint: Constraint, outputs: Sequence[int]) -> Sequence[int] | None:
    """The outputs that the constraint is about; None: it has not begun."""
    after = list(constraint.begin_after)
    for start in range(len(outputs) - len(after) + 1):
        if list(outputs[start : start + len(after)]) == after:
            return outputs[start + len(after) :]
    return None


def constrained(constraint: Constraint, outputs: Sequence[int], drawn: int, vocabulary: int, end: int) -> int:
    """The token that comes after `outputs` where the model has drawn `drawn`: an allowed one; `end` once the constraint is complete."""
    held, (of, length) = _held(constraint, outputs), _rule(constraint)
    if held is None:
        return drawn
    allowed = range(of, vocabulary, of)
    return end if len(held) >= length else allowed[drawn % len(allowed)]


def is_complete(constraint: Constraint, outputs: Sequence[int]) -> bool:
    """Whether nothing more may come."""
    held = _held(constraint, outputs)
    return held is not None and len(held) >= _rule(constraint)[1]
