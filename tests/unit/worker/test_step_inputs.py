from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from services.worker.sampling.rows import SamplingRows
from services.worker.slots import SlotTable, StagedRow
from services.worker.step_inputs import KeptSampling, build_inputs, build_sampling
from tests.unit.worker.helpers import GREEDY, LIMITS, batch, opening, row

RANDOM = replace(GREEDY, temperature=0.7, top_p=0.9, seed=7, max_tokens=9)


def decoding(first: object = RANDOM, second: object = GREEDY) -> SlotTable:
    """Slot 0 with 18 tokens in blocks 7 and 3, slot 1 with 2 in block 9, each behind its first drawn token."""
    slots = SlotTable(LIMITS, ())
    opens = [opening(0, range(3, 21), sampling=first), opening(1, [10, 11], sampling=second)]
    return stepped(slots, row(0, 18, blocks=[7, 3]), row(1, 2, blocks=[9]), opens=opens)


def stepped(slots: SlotTable, *rows: object, **parts: object) -> SlotTable:
    staged = slots.stage(batch(*rows, **parts))  # type: ignore[arg-type]
    slots.commit(staged, {item.index: 50 for item in staged.rows})
    return slots


def staged(slots: SlotTable, *numbers: int) -> Sequence[StagedRow]:
    return slots.stage(batch(*(row(number) for number in numbers))).rows


def listed(rows: SamplingRows) -> list[object]:
    return [getattr(rows, item.name).tolist() for item in fields(rows) if item.name != "edits"]


@pytest.mark.parametrize("numbers", [(0,), (1,), (0, 1), (1, 0)])
def test_rows_of_a_token_each_have_the_inputs_that_they_have_beside_a_longer_one(numbers: tuple[int, ...]):
    slots = decoding()
    alone = build_inputs(staged(slots, *numbers))
    longer = slots.stage(batch(*map(row, numbers), row(2, 3, sample=False, blocks=[4, 5]), opens=[opening(2, range(3, 30))])).rows
    beside, count = build_inputs(longer), len(numbers)
    for name in ("token_ids", "positions", "cache_slots", "kv_lengths", "sampled"):
        mine, other = getattr(alone, name), getattr(beside, name)
        assert mine.tolist() == other[:count].tolist(), name
        assert mine.dtype is other.dtype, name
    assert alone.query_starts.tolist() == beside.query_starts[: count + 1].tolist()
    width = alone.block_tables.shape[1]
    assert alone.block_tables.tolist() == beside.block_tables[:count, :width].tolist()
    assert alone.block_tables.is_contiguous()


def test_a_row_that_begins_a_block_has_that_block_in_its_table():
    slots = stepped(SlotTable(LIMITS, ()), row(0, 16, blocks=[7, 3]), opens=[opening(0, range(3, 19))])
    inputs = build_inputs(staged(slots, 0))
    assert (inputs.block_tables.tolist(), inputs.cache_slots.tolist()) == ([[7, 3]], [3 * 16])


def test_what_the_same_rows_ask_for_is_kept_but_for_the_length_of_their_outputs():
    slots, sampling = decoding(), KeptSampling()
    first = sampling.build(staged(slots, 0, 1), 100)
    for _ in range(3):
        assert listed(sampling.build(staged(slots, 0, 1), 100)) == listed(build_sampling(staged(slots, 0, 1), 100))
        stepped(slots, row(0), row(1))
    assert sampling.build(staged(slots, 0, 1), 100) is first


@pytest.mark.parametrize("numbers", [(1, 0), (0,), (1,)])
def test_other_rows_are_looked_at_again(numbers: tuple[int, ...]):
    slots, sampling = decoding(), KeptSampling()
    sampling.build(staged(slots, 0, 1), 100)
    assert listed(sampling.build(staged(slots, *numbers), 100)) == listed(build_sampling(staged(slots, *numbers), 100))


def test_a_slot_that_was_opened_anew_is_looked_at_again():
    slots, sampling = decoding(), KeptSampling()
    sampling.build(staged(slots, 0, 1), 100)
    stepped(slots, row(0, 2, blocks=[7]), opens=[opening(0, [10, 11], sampling=GREEDY)])
    assert sampling.build(staged(slots, 0, 1), 100).temperature.tolist() == [0, 0]


def test_rows_that_may_be_banned_other_ids_in_the_next_step_are_looked_at_each_time():
    slots, sampling = decoding(replace(RANDOM, min_tokens=3, stop_token_ids=(8,))), KeptSampling()
    found = []
    for _ in range(4):
        found.append(sampling.build(staged(slots, 0, 1), 100).banned_ids.tolist())
        stepped(slots, row(0), row(1))
    assert found == [[8], [8], [], []]
