"""How long a step will take, learned from the worker's own timings, so that the next one can be planned as late as possible.

Planned too early, an arrival waits one and a half steps; too late, the worker idles. So step N+1 is sent when N's predicted rest falls
under a margin (PROTOCOL.md rule 26).
"""

from __future__ import annotations

_WEIGHT = 0.25


class StepPredictor:
    """Exponentially weighted mean and deviation of step times by size class: decode-only or not, in powers of two of the tokens.

    As TCP estimates a round trip (Jacobson 1988), but looking for the early side: on a noisy machine the next step is sent earlier, and so
    it is where a step is smaller than its class was of late, as when the rows of a batch end one after the other.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[bool, int], tuple[float, float, float]] = {}  # mean, deviation, mean of the tokens

    @staticmethod
    def _key(tokens: int, rows: int) -> tuple[bool, int]:
        return tokens == rows, tokens.bit_length()

    def observe(self, tokens: int, rows: int, total_us: int) -> None:
        """A step of `tokens` tokens in `rows` rows took `total_us` on the worker's clock."""
        key = self._key(tokens, rows)
        if key not in self._classes:
            self._classes[key] = (float(total_us), 0.0, float(tokens))
            return
        mean, deviation, size = self._classes[key]
        error = total_us - mean
        self._classes[key] = (mean + _WEIGHT * error, deviation + _WEIGHT * (abs(error) - deviation), size + _WEIGHT * (tokens - size))

    def predict_us(self, tokens: int, rows: int) -> float | None:
        """When a step may be over, in microseconds after its start: the mean less one deviation, at least half the mean, and for fewer
        tokens than the class had of late so much less as if time were in proportion to them.

        None when none of its class was seen yet.
        """
        found = self._classes.get(self._key(tokens, rows))
        if found is None:
            return None
        mean, deviation, size = found
        return max(mean - deviation, mean / 2) * min(1.0, tokens / size)
