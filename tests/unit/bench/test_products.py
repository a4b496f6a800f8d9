"""What products are compared with."""

from __future__ import annotations

import pytest

from bench.limits import Limits
from bench.products import PARAMETERS, limit_ms


def test_the_limit_is_that_of_memory_for_few_rows_and_that_of_multiplications_for_many():
    limits = Limits(threads=2, gflops=200.0, gigabytes=40.0)
    assert limit_ms(limits, 1) == limit_ms(limits, 4) == pytest.approx(PARAMETERS * 4 / 40e9 * 1000)
    assert limit_ms(limits, 512) == pytest.approx(PARAMETERS * 2 * 512 / 200e9 * 1000)


def test_the_products_are_those_of_the_model_that_is_served():
    assert PARAMETERS == 30 * 3_538_944 + 49_152 * 576
