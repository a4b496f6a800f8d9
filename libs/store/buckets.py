"""The arithmetic of quotas: token buckets, kept as one instant each (GCRA, the generic cell rate algorithm).

    full_at   the instant at which the bucket is full again; in the past: it is full
    level     limit * (now + period - full_at) / period, at most `limit`; negative: in debt
    charge    full_at = max(full_at, now) + cost * period / limit

One number a bucket, no state for one that is full, and a changed limit needs no conversion: the share that is used stays. Every store does
the same with it; Redis in Lua (libs/store/redis.py), which the contract tests compare with this. Instants are in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MICROS = 1_000_000


@dataclass(frozen=True, slots=True)
class Charge:
    """`cost` units of the bucket that holds `limit` (at least 1) of them and fills within `period_seconds`.

    A spend of more than `limit` costs `limit`: it fits when the bucket is full, or it never would. One call names a bucket once.
    """

    bucket: str
    cost: float
    limit: int
    period_seconds: float = 60.0

    @property
    def period_us(self) -> float:
        """The period in microseconds."""
        return self.period_seconds * _MICROS

    def step_us(self, cost: float) -> float:
        """How much later the bucket is full for `cost` units."""
        return cost * self.period_us / self.limit


@dataclass(frozen=True, slots=True)
class Balance:
    """A bucket after a call: units that remain (0 in debt), seconds until it is full, and until the charge fits (0: now, or it did)."""

    remaining: int
    reset_seconds: float
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Spending:
    """Whether the charges were taken, and their buckets' balances, in the order of the charges."""

    taken: bool
    balances: tuple[Balance, ...]


def take(charges: Sequence[Charge], full_at: Sequence[float], now_us: float, *, force: bool) -> tuple[bool, list[float]]:
    """Whether the charges are taken, and when each bucket is full then. `force`: whatever they cost."""
    begun = [max(instant, now_us) for instant in full_at]
    if force:
        return True, [max(instant + charge.step_us(charge.cost), now_us) for charge, instant in zip(charges, begun, strict=True)]
    after = [instant + charge.step_us(min(charge.cost, charge.limit)) for charge, instant in zip(charges, begun, strict=True)]
    if any(instant > now_us + charge.period_us for charge, instant in zip(charges, after, strict=True)):
        return False, begun
    return True, after


def spending(charges: Sequence[Charge], full_at: Sequence[float], now_us: float, *, taken: bool) -> Spending:
    """What a call has come to: `full_at` are the buckets' instants after it."""
    return Spending(taken, tuple(_balance(charge, max(at, now_us), now_us, taken) for charge, at in zip(charges, full_at, strict=True)))


def _balance(charge: Charge, full_at: float, now_us: float, taken: bool) -> Balance:
    level = charge.limit * (now_us + charge.period_us - full_at) / charge.period_us
    fits_at = full_at + charge.step_us(min(charge.cost, charge.limit)) - charge.period_us
    return Balance(
        # A hair is added: what was divided and multiplied again must not lose a unit to rounding.
        remaining=max(0, int(level + 1e-6)),
        reset_seconds=(full_at - now_us) / _MICROS,
        retry_seconds=0.0 if taken else max(0.0, fits_at - now_us) / _MICROS,
    )
