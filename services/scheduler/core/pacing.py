"""How long a step will take, learned from the worker's own timings, so that the next one can be planned as late as possible.

Planned too early, an arrival waits one and a half steps; too late, the worker idles. So step N+1 is sent when N's predicted rest falls
under a margin (PROTOCOL.md rule 26).
"""

from __future__ import annotations

_WEIGHT = 0.25


class StepPredictor:
    """Exponentially weighted step times by size class: decode-only steps by rows, others by tokens, in powers of two."""

    def __init__(self) -> None:
        self._classes: dict[tuple[bool, int], float] = {}

    @staticmethod
    def _key(tokens: int, rows: int) -> tuple[bool, int]:
        return tokens == rows, tokens.bit_length()

    def observe(self, tokens: int, rows: int, total_us: int) -> None:
        """A step of `tokens` tokens in `rows` rows took `total_us` on the worker's clock."""
        key = self._key(tokens, rows)
        old = self._classes.get(key)
        self._classes[key] = float(total_us) if old is None else old + _WEIGHT * (total_us - old)

    def predict_us(self, tokens: int, rows: int) -> float | None:
        """Expected duration of a step in microseconds; None when none of its class was seen yet."""
        return self._classes.get(self._key(tokens, rows))
