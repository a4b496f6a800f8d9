from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import TokenloomError
from libs.sampling import SamplingParams
from services.worker.slots import Slot, SlotTable
from services.worker.step_inputs import build_inputs, build_sampling
from tests.unit.worker.helpers import GREEDY, LIMITS, batch, opening, row
from tokenloom.worker.v1 import worker_pb2

OK, NOT_RUN = worker_pb2.ROW_OUTCOME_OK, worker_pb2.ROW_OUTCOME_NOT_RUN
EOS = (2,)


def table() -> SlotTable:
    return SlotTable(LIMITS, EOS)


def state(slot: Slot | None) -> tuple[object, ...]:
    assert slot is not None
    return (
        slot.tokens[: slot.known].tolist(),
        slot.computed,
        slot.blocks[: slot.num_blocks].tolist(),
        slot.output_length,
        slot.prompt_length,
    )


def run(slots: SlotTable, *rows: object, drawn: dict[int, int] | None = None, **parts: object) -> list[int]:
    staged = slots.stage(batch(*rows, **parts))  # type: ignore[arg-type]
    tokens = {item.index: (drawn or {}).get(item.index, 50) for item in staged.rows if item.sample}
    slots.commit(staged, tokens)
    return staged.outcomes


def test_a_prompt_in_chunks_then_tokens_fed_forward():
    slots = table()
    assert run(slots, row(0, 16, sample=False, blocks=[7]), opens=[opening(0, range(3, 23))]) == [OK]
    assert run(slots, row(0, 4, blocks=[5]), drawn={0: 60}) == [OK]
    assert run(slots, row(0), drawn={0: 61}) == [OK]
    assert state(slots[0]) == ([*range(3, 23), 60, 61], 21, [7, 5], 2, 20)


def test_staging_alone_changes_nothing():
    slots = table()
    run(slots, row(0, 4, blocks=[1]), row(1, 3, blocks=[2]), opens=[opening(0, [3, 4, 5, 6]), opening(1, [7, 8, 9])])
    before = [copy.deepcopy(state(slots[slot])) for slot in (0, 1)]
    slots.stage(batch(row(0, blocks=[9]), row(1, 2, blocks=[3]), opens=[opening(1, [40, 41])], closes=[]))
    slots.stage(batch(row(1), closes=[0]))
    assert [state(slots[slot]) for slot in (0, 1)] == before


def test_an_opening_forgets_what_was_in_its_slot():
    slots = table()
    run(slots, row(0, 2, blocks=[1]), opens=[opening(0, [3, 4])])
    run(slots, row(0, 1, blocks=[6]), opens=[opening(0, [9])], drawn={0: 70})
    assert state(slots[0]) == ([9, 70], 1, [6], 1, 1)


def test_closes_happen_before_opens():
    slots = table()
    run(slots, row(0, 2, blocks=[1]), opens=[opening(0, [3, 4])])
    assert run(slots, row(0, 1, blocks=[6]), opens=[opening(0, [9])], closes=[0]) == [OK]
    assert state(slots[0])[0][0] == 9


def test_a_row_of_a_closed_or_empty_slot_is_not_run_and_others_are():
    slots = table()
    run(slots, row(0, 2, blocks=[1]), row(1, 2, blocks=[2]), opens=[opening(0, [3, 4]), opening(1, [3, 4])])
    assert run(slots, row(0), row(1), row(4), closes=[0]) == [NOT_RUN, OK, NOT_RUN]
    assert len(slots) == 1


def test_a_row_whose_token_never_came_is_not_run():
    slots = table()
    staged = slots.stage(batch(row(0, 2, blocks=[1]), opens=[opening(0, [3, 4])]))
    slots.commit(staged, {})  # its logits were not finite
    assert run(slots, row(0)) == [NOT_RUN]


def test_prefix_hits_start_the_slot_in_given_blocks():
    slots = table()
    run(slots, row(0, 8, blocks=[9]), opens=[opening(0, range(40), blocks=[4, 6], computed=32)])
    assert state(slots[0]) == ([*range(40), 50], 40, [4, 6, 9], 1, 40)


@given(prompt=st.lists(st.integers(3, 99), min_size=1, max_size=40), output=st.lists(st.integers(3, 99), min_size=1, max_size=20))
def test_a_slot_reopened_with_its_output_is_the_slot_that_was_never_left(prompt: list[int], output: list[int]):
    lived, reopened = table(), table()
    run(lived, row(0, len(prompt), blocks=[1, 2, 3, 4]), opens=[opening(0, prompt)], drawn={0: output[0]})
    for token in output[1:]:
        run(lived, row(0), drawn={0: token})
    known = len(prompt) + len(output) - 1
    run(reopened, row(0, known, blocks=[1, 2, 3, 4]), opens=[opening(0, prompt, output=output[:-1])], drawn={0: output[-1]})
    assert state(lived[0]) == state(reopened[0])
    following = [slots.stage(batch(row(0))).rows for slots in (lived, reopened)]
    inputs, again = (build_inputs(rows) for rows in following)
    assert inputs.token_ids.tolist() == again.token_ids.tolist()
    assert inputs.positions.tolist() == again.positions.tolist() == [known]
    drawn, redrawn = (build_sampling(rows, 100) for rows in following)
    assert drawn.output_indices.tolist() == redrawn.output_indices.tolist() == [len(output)]


def test_ids_that_end_the_output_are_banned_until_min_tokens():
    slots = table()
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(8, 500))
    staged = slots.stage(batch(row(0, 1, blocks=[1]), row(1, 1, blocks=[2]), opens=[opening(0, [5], sampling=params), opening(1, [6])]))
    sampling = build_sampling(staged.rows, 100)
    assert list(zip(sampling.banned_rows.tolist(), sampling.banned_ids.tolist(), strict=True)) == [(0, 2), (0, 8)]
    slots.commit(staged, {0: 30, 1: 30})
    run(slots, row(0), drawn={0: 31})
    assert build_sampling(slots.stage(batch(row(0))).rows, 100).banned_ids.size == 0


def test_with_ignore_eos_only_stop_tokens_are_banned():
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(8,), ignore_eos=True)
    staged = table().stage(batch(row(0, 1, blocks=[1]), opens=[opening(0, [5], sampling=params)]))
    assert build_sampling(staged.rows, 100).banned_ids.tolist() == [8]


@pytest.mark.parametrize(
    ("params", "drawn", "ended"),
    [(GREEDY, 2, True), (GREEDY, 9, False), (replace(GREEDY, ignore_eos=True), 2, False), (replace(GREEDY, stop_token_ids=(9,)), 9, True)],
)
def test_within_a_lease_rows_that_ended_are_skipped(params: SamplingParams, drawn: int, ended: bool):
    slots = table()
    run(slots, row(0, 1, blocks=[1]), opens=[opening(0, [5], sampling=params)], drawn={0: drawn})
    assert slots.stage(batch(row(0)), skip_ended=True).outcomes == [NOT_RUN if ended else OK]
    assert slots.stage(batch(row(0))).outcomes == [OK], "a batch of its own decides for itself"


def test_no_token_beyond_max_tokens():
    slots = table()
    run(slots, row(0, 1, blocks=[1]), opens=[opening(0, [5], sampling=SamplingParams(max_tokens=2))])
    assert run(slots, row(0)) == [OK]
    assert run(slots, row(0)) == [NOT_RUN]


@pytest.mark.parametrize(
    ("rows", "opens", "text"),
    [
        ([row(0, 17, blocks=[1])], [opening(0, range(17))], "1 blocks for 17 tokens"),
        ([row(0, 1, blocks=[64])], [opening(0, [5])], "block 64 of 64"),
        ([row(0, 1, blocks=range(9))], [opening(0, [5])], "9 blocks; 8 hold"),
        ([row(0, 1, blocks=[1])], [opening(0, [5, 6])], "sampled after token 1 of 2"),
        ([], [opening(8, [5])], "slot 8 of 8"),
        ([], [opening(0, [100])], "token id 100"),
        ([], [opening(0, [5] * 100, output=[6] * 40)], "140 tokens"),
        ([], [opening(0, [5] * 40, blocks=[1], computed=17)], "17 computed tokens in 1 blocks"),
        (
            [row(slot, 100, sample=False, blocks=range(7)) for slot in range(3)],
            [opening(slot, [5] * 120) for slot in range(3)],
            "300 tokens",
        ),
    ],
)
def test_what_no_correct_scheduler_sends_is_refused(rows: list, opens: list, text: str):
    with pytest.raises(TokenloomError, match=text):
        table().stage(batch(*rows, opens=opens))


def test_the_inputs_of_a_ragged_step():
    slots = table()
    run(slots, row(1, 18, blocks=[7, 3]), opens=[opening(1, range(3, 21))], drawn={0: 44})
    staged = slots.stage(batch(row(1), row(0, 3, sample=False, blocks=[9]), opens=[opening(0, [10, 11, 12, 13])]))
    inputs = build_inputs(staged.rows)
    assert inputs.token_ids.tolist() == [44, 10, 11, 12]
    assert inputs.positions.tolist() == [18, 0, 1, 2]
    assert inputs.cache_slots.tolist() == [3 * 16 + 2, 9 * 16, 9 * 16 + 1, 9 * 16 + 2]
    assert inputs.query_starts.tolist() == [0, 1, 4]
    assert inputs.kv_lengths.tolist() == [19, 3]
    assert inputs.block_tables.tolist() == [[7, 3], [9, 0]]
    assert inputs.sampled.tolist() == [0]
