"""Tokens taken by the C++ sampler: those that torch takes, for every instruction set, whatever stands beside a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.cpu import CpuOps
from services.worker.sampling.picking import PickRows, pick
from services.worker.sampling.rows import SamplingRows
from services.worker.sampling.sampler import sample
from tests.unit.worker.test_sampler import rows

VOCABULARIES = [1, 5, 67, 255, 257, 3000]
parameters = st.tuples(
    st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.8]),
    st.sampled_from([0, 1, 3, 50, 256, 300, 5000]),
    st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


def table(entries: list[tuple[float, int, float, float, float]]) -> PickRows:
    temperature, top_k, top_p, min_p, uniforms = (np.array(column) for column in zip(*entries, strict=True))
    return PickRows(temperature.astype(np.float64), top_k.astype(np.int64), top_p.astype(np.float64), min_p.astype(np.float64), uniforms)


@settings(deadline=None, max_examples=80)
@given(
    entries=st.lists(parameters, min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    width=st.sampled_from(VOCABULARIES),
    extra=st.integers(0, 20),
)
def test_every_row_gets_the_token_that_torch_takes_in_any_company(ops, entries, seed, spread, width, extra):
    drawn = np.random.default_rng(seed).standard_normal((len(entries), width + extra)) * spread
    logits = torch.from_numpy(drawn.astype(np.float32).round(2))[:, :width]  # rounded: ties
    wanted, given = pick(logits, table(entries)), (picker := ops.picker())(logits, table(entries))
    assert given.finite.all()
    assert given.tokens.tolist() == wanted.tokens.tolist()
    for index, entry in enumerate(entries):
        assert picker(logits[index : index + 1], table([entry])).tokens[0] == given.tokens[index]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, 699])
def test_a_row_that_is_not_finite_is_reported_and_spoils_no_other(ops: CpuOps, bad: float, place: int):
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    drawn = rows(3, temperature=[1.0, 1.0, 0.0], top_p=0.9)
    clean = sample(logits.clone(), drawn, 700, picker=ops.picker())
    logits[1, place] = bad
    spoiled = sample(logits, drawn, 700, picker=ops.picker())
    assert spoiled.finite.tolist() == [True, False, True]
    assert spoiled.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_banned_ids_are_never_taken_and_a_row_without_any_is_dead(ops: CpuOps, options: dict[str, object]):
    banned = [(0, token) for token in range(40)] + [(1, token) for token in range(700)]
    drawn: SamplingRows = rows(64, banned=banned, **options)
    logits = torch.randn(64, 700, generator=torch.Generator().manual_seed(2))
    logits[0, :40] = 9
    ours, theirs = sample(logits.clone(), drawn, 700, picker=ops.picker()), sample(logits.clone(), drawn, 700)
    assert ours.dead.tolist() == [index == 1 for index in range(64)] == theirs.dead.tolist()
    living = [index for index in range(64) if index != 1]
    assert ours.tokens[living].tolist() == theirs.tokens[living].tolist()
    assert ours.tokens[0] >= 40


def test_a_temperature_that_makes_all_logits_infinite_takes_the_greatest(ops: CpuOps):
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3))
    tiny = table([(1e-320, 0, 1.0, 0.0, 0.5)])
    assert ops.picker()(logits, tiny).tokens[0] == logits.argmax()


@pytest.mark.parametrize("column", ["temperature", "top_p", "min_p", "uniforms", "top_k"])
def test_a_column_of_another_type_is_refused(ops: CpuOps, column: str):
    """Its bytes would be read as other numbers, and beyond its end."""
    parameters = table([(1.0, 3, 0.9, 0.0, 0.5)])
    object.__setattr__(parameters, column, getattr(parameters, column).astype(np.float32))
    with pytest.raises(ValueError, match="float32"):
        ops.picker()(torch.zeros(1, 9), parameters)


def test_logits_of_another_type_are_refused(ops: CpuOps):
    with pytest.raises(ValueError, match="float64"):
        ops.picker()(torch.zeros(1, 700, dtype=torch.float64), table([(0.0, 0, 1.0, 0.0, 0.5)]))
