from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sampling.draws import philox, uniforms

words64 = st.integers(0, 2**64 - 1)
words32 = st.integers(0, 2**32 - 1)


def u64(*values: int) -> np.ndarray:
    return np.asarray(values, np.uint64)


def test_philox_gives_the_published_answers():
    """Known-answer vectors of the authors' Random123 distribution."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for counter, key, expected in cases:
        words = philox(tuple(u64(word) for word in counter), tuple(u64(word) for word in key))
        assert tuple(int(word[0]) for word in words) == expected


@given(seed=words64, choice=words32, index=words32)
def test_a_draw_lies_in_the_unit_interval_and_repeats(seed: int, choice: int, index: int):
    first, again = (float(uniforms(u64(seed), u64(choice), u64(index))[0]) for _ in range(2))
    assert 0.0 <= first < 1.0
    assert first == again


@given(rows=st.lists(st.tuples(words64, words32, words32), min_size=1, max_size=20))
def test_a_draw_does_not_depend_on_the_rows_beside_it(rows: list[tuple[int, int, int]]):
    seeds, choices, indices = (u64(*column) for column in zip(*rows, strict=True))
    together = uniforms(seeds, choices, indices)
    alone = [float(uniforms(u64(a), u64(b), u64(c))[0]) for a, b, c in rows]
    assert together.tolist() == alone


def test_every_input_matters_and_the_draws_are_uniform():
    count = 20_000
    ramp, zeros = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    for columns in ((ramp, zeros, zeros), (zeros, ramp, zeros), (zeros, zeros, ramp), (ramp << np.uint64(32), zeros, zeros)):
        drawn = uniforms(*columns)
        assert np.unique(drawn).size == count
        histogram = np.histogram(drawn, bins=20, range=(0, 1))[0]
        assert abs(histogram - count / 20).max() < 6 * (count / 20) ** 0.5
        assert abs(float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])) < 0.03
