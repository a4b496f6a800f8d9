from __future__ import annotations

from typing import Any

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from services.worker.batch import parse_batch
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def message(**changes: object) -> worker_pb2.StepBatch:
    fields: dict[str, object] = {
        "epoch": 5,
        "number": 7,
        "predecessor": 6,
        "closes": [3],
        "opens": [
            worker_pb2.Open(
                slot=1,
                request="g:1",
                prompt_ids=pack_ids([10, 11, 12]),
                output_ids=pack_ids([13]),
                computed_tokens=2,
                block_ids=pack_ids([8]),
                sampling=common_pb2.SamplingParams(max_tokens=9, temperature=0.5, top_p=1, seed=2**64 - 1),
                trace=common_pb2.TraceContext(traceparent=TRACEPARENT),
                decode_span_id=77,
                request_span_id=78,
            )
        ],
        "slots": [1, 0],
        "counts": [2, 1],
        "samples": b"\x01\x00",
        "new_block_counts": [0, 2],
        "new_block_ids": pack_ids([4, 5]),
    }
    return worker_pb2.StepBatch(**(fields | changes))


def test_a_batch_arrives_as_it_was_sent():
    parsed = parse_batch(message())
    assert (parsed.epoch, parsed.number, parsed.predecessor, parsed.lease_steps, parsed.closes) == (5, 7, 6, 1, (3,))
    assert [(row.slot, row.count, row.sample, row.new_blocks.tolist()) for row in parsed.rows] == [(1, 2, True, []), (0, 1, False, [4, 5])]
    opening = parsed.opens[0]
    assert (opening.prompt_ids.tolist(), opening.output_ids.tolist(), opening.block_ids.tolist()) == ([10, 11, 12], [13], [8])
    assert (opening.request, opening.computed_tokens, opening.sampling.seed) == ("g:1", 2, 2**64 - 1)
    assert str(opening.trace) == TRACEPARENT
    assert (opening.decode_span_id, opening.request_span_id) == (77, 78)


def test_a_batch_without_rows_is_a_batch():
    parsed = parse_batch(worker_pb2.StepBatch(epoch=1, number=1, closes=[2]))
    assert parsed.rows == ()


def test_later_steps_of_a_lease_repeat_the_rows_only():
    lease = parse_batch(
        worker_pb2.StepBatch(
            epoch=1,
            number=4,
            lease_steps=3,
            closes=[9],
            slots=[0],
            counts=[1],
            samples=b"\1",
            new_block_counts=[1],
            new_block_ids=pack_ids([2]),
        )
    )
    later = lease.later_step(2)
    assert (later.number, later.closes, later.rows[0].new_blocks.size, later.rows[0].slot) == (6, (), 0, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"counts": [2]}, "2 slots, but"),
        ({"samples": b"\1"}, "2 slots, but"),
        ({"slots": [1, 1]}, "two rows"),
        ({"counts": [2, 0]}, "no tokens"),
        ({"new_block_counts": [1, 2]}, "sum to 3, new_block_ids holds 2"),
        ({"new_block_ids": b"\1\2\3"}, "no multiple of 4"),
        ({"new_block_ids": pack_ids([4, 2**31])}, "2\\*\\*31"),
        ({"lease_steps": 2}, "one sampled token"),
        ({"opens": [worker_pb2.Open(request="x")]}, "empty prompt"),
        ({"opens": [worker_pb2.Open(request="x", prompt_ids=pack_ids([1, 2]), computed_tokens=2)]}, "2 computed of 2"),
    ],
)
def test_a_message_that_contradicts_itself_is_a_violation(changes: dict[str, object], text: str):
    with pytest.raises(TokenloomError, match=text) as caught:
        parse_batch(message(**changes))
    assert caught.value.code is ErrorCode.PROTOCOL_VIOLATION


def opened(**fields: object) -> dict[str, object]:
    return {"opens": [worker_pb2.Open(request="x", prompt_ids=pack_ids([1]), **fields)]}


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_counts": [0, 2]},
        {"offsets": [0, -1]},
        opened(adapter_slot=1),
    ],
)
def test_what_this_worker_cannot_do_is_refused_by_name(changes: dict[str, object]):
    with pytest.raises(TokenloomError) as caught:
        parse_batch(message(**changes))
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1},
        {"top_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": -1},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"logit_bias_ids": [4], "logit_bias_values": [float("inf")]},
        {"logit_bias_ids": [4, 5], "logit_bias_values": [1]},
        {"logit_bias_ids": [4, 4], "logit_bias_values": [1, 2]},
        {"bad_words": [b""]},
        {"bad_words": [b"abc"]},
        {"allowed_token_ids": b"abcde"},
        {"extra_args_json": b"[1]"},
        {"extra_args_json": b"{"},
        {"extra_args_json": b"[" * 60_000},
    ],
)
def test_sampling_that_has_no_meaning_is_a_violation(sampling: dict[str, Any]):
    changed = message()
    changed.opens[0].sampling.MergeFrom(common_pb2.SamplingParams(**sampling))
    with pytest.raises(TokenloomError) as caught:
        parse_batch(changed)
    assert caught.value.code is ErrorCode.PROTOCOL_VIOLATION
