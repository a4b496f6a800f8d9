"""Uniform numbers as a pure function of (seed, choice index, output index, purpose): PROTOCOL.md rule 13.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of
multiplication and exclusive-or turn a 64-bit key and a 128-bit counter into 128 random bits. There is no state to carry, so a draw is the
same in any batch, after preemption and on another worker.

    key      low and high half of seed
    counter  output index, choice index, purpose, 0
    u        the first two words' upper 53 bits / 2**53, in [0, 1)
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a draw is for; draws of different purposes are independent. Numbers are part of the promise and never change."""

    TOKEN = 0


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 over arrays: every word is a uint64 that holds 32 bits; all arrays have the same shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> _HALF) ^ c1 ^ k0, high & _MASK, (low >> _HALF) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: Words, choices: Words, indices: Words, purpose: Purpose = Purpose.TOKEN) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits. All arrays are uint64 of one shape; choices and indices are below 2**32."""
    zeros = np.zeros_like(seeds)
    words = philox((indices, choices, zeros + np.uint64(purpose), zeros), (seeds & _MASK, seeds >> _HALF))
    bits = (words[0] << _HALF | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
