"""Constraints over the worker's stream: prepared beside the steps, kept to in them, ended by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from libs import rpc
from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from libs.text.build import build_text_table
from libs.text.table import TextTable
from services.worker.config import WorkerConfig
from services.worker.constraints import progress
from services.worker.service import serve
from tests.integration.test_worker_service import Stream, opening
from tests.support.tiny_llama import tiny_tokenizer_json
from tokenloom.worker.v1 import worker_pb2, worker_pb2_grpc

WAIT = 60.0
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture
async def address(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[str]:
    address, stop = f"unix:{tmp_path}/worker.sock", asyncio.Event()
    config = WorkerConfig(
        model=tiny_llama_dir, listen=address, kv_cache_memory_bytes=16 << 20, max_num_seqs=8, threads=2, constraint_timeout=2.0
    )
    task = asyncio.create_task(serve(config, "w-1", stop))
    yield address
    stop.set()
    assert await asyncio.wait_for(task, WAIT) == 0


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with rpc.connect(address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


@pytest.fixture(scope="module")
def table() -> TextTable:
    return build_text_table(Tokenizer.from_str(json.dumps(tiny_tokenizer_json())), "tiny")


async def attached(stub: Any, epoch: int = 1) -> Stream:
    """A stream of a scheduler, as soon as the worker has loaded."""
    async with asyncio.timeout(WAIT):
        while True:
            try:
                stream = Stream(stub, epoch=epoch)
                await stream.attach()
                return stream
            except (TokenloomError, grpc.aio.AioRpcError):  # it does not listen yet, or loads
                await asyncio.sleep(0.05)


async def prepare(stream: Stream, number: int, constraint: Constraint) -> worker_pb2.Prepared:
    message = worker_pb2.Prepare(epoch=stream.epoch, id=number, constraint=constraint.to_proto())
    await stream.call.write(worker_pb2.RunRequest(prepare=message))
    return (await stream.read("prepared")).prepared


def constrained(slot: int, number: int, **sampling: Any) -> worker_pb2.Open:
    message = opening(slot, [10, 11, 12], temperature=1.0, seed=5, max_tokens=100, **sampling)
    message.constraint_id = number
    return message


async def run_out(stream: Stream, opened: worker_pb2.Open, first: int = 1) -> tuple[list[int], int]:
    """Opens and steps alone until the row is more than ok; its output ids and last outcome. Steps count from `first`."""
    known = len(unpack_ids(opened.prompt_ids)) + len(unpack_ids(opened.output_ids))
    await stream.send(first, 0, {opened.slot: known}, opens=[opened])
    output, number = unpack_ids(opened.output_ids), first
    while True:
        result = await stream.result()
        assert result.outcome == worker_pb2.BATCH_OUTCOME_OK, result.error
        output += unpack_ids(result.token_ids)
        if result.row_outcomes[0] != worker_pb2.ROW_OUTCOME_OK or len(output) >= 100:
            return output, result.row_outcomes[0]
        await stream.send(number + 1, number, {opened.slot: 1})
        number += 1


@pytest.mark.composes("structured output", "worker loss")
async def test_an_output_keeps_to_its_constraint_ends_with_it_and_goes_on_alike_elsewhere(stub: Any, table: TextTable):
    stream = await attached(stub)
    prepared = await prepare(stream, 1, Constraint(ConstraintKind.JSON_SCHEMA, (PERSON,), compact=True))
    assert not prepared.HasField("error")
    assert prepared.compile_us > 0
    output, outcome = await run_out(stream, constrained(0, 1))
    assert outcome == worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE
    text = b"".join(table.tokens[token] for token in output).decode()
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert " " not in text.replace(person["name"], "")
    again = await attached(stub, epoch=2)
    assert (await prepare(again, 7, Constraint(ConstraintKind.JSON_SCHEMA, (PERSON,), compact=True))).compile_us == 0, "it is cached"
    resumed = constrained(3, 7)
    resumed.output_ids = pack_ids(output[:5])
    assert await run_out(again, resumed) == (output, outcome)


async def test_what_cannot_be_compiled_is_refused_with_its_parameter_and_the_next_is_prepared(stub: Any):
    stream = await attached(stub)
    bad = Constraint(ConstraintKind.JSON_SCHEMA, ('{"not": {}}',), param="response_format.json_schema.schema")
    prepared = await prepare(stream, 1, bad)
    assert ErrorCode.from_number(prepared.error.code) is ErrorCode.INVALID_CONSTRAINT
    assert prepared.error.param == "response_format.json_schema.schema"
    assert "not" in prepared.error.message
    assert (await prepare(stream, 2, bad)).error.message == prepared.error.message
    assert not (await prepare(stream, 3, Constraint(ConstraintKind.CHOICE, ("a", "b")))).HasField("error")


async def test_a_row_whose_constraint_can_go_no_further_says_why(stub: Any, monkeypatch: pytest.MonkeyPatch):
    stream = await attached(stub)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("a", "b")))
    monkeypatch.setattr(progress, "MASK_SECONDS", -1.0)
    await stream.send(1, 0, {0: 3}, opens=[constrained(0, 1)])
    result = await stream.result()
    assert (list(result.row_outcomes), dict(result.dead_ends)) == (
        [worker_pb2.ROW_OUTCOME_DEAD_END],
        {0: "a mask took more than -1.0 s"},
    )


async def test_an_opening_with_a_constraint_that_is_forgotten_or_of_another_epoch_fails_its_batch(stub: Any):
    stream = await attached(stub)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("a", "b")))
    await stream.call.write(worker_pb2.RunRequest(forget=worker_pb2.Forget(epoch=1, ids=[1, 99])))
    await stream.send(1, 0, {0: 3}, opens=[constrained(0, 1)])
    result = await stream.result()
    assert result.outcome == worker_pb2.BATCH_OUTCOME_FAILED
    assert ErrorCode.from_number(result.error.code) is ErrorCode.PROTOCOL_VIOLATION


async def test_a_choice_ends_with_its_last_token_whatever_is_asked_of_the_end_of_sequence(stub: Any, table: TextTable):
    stream = await attached(stub)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("left", "right")))
    for epoch, options in enumerate(({}, {"ignore_eos": True}, {"min_tokens": 50}), start=2):
        stream = await attached(stub, epoch)
        await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("left", "right")))
        output, outcome = await run_out(stream, constrained(0, 1, **options))
        assert outcome == worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE
        assert b"".join(table.tokens[token] for token in output) in (b"left", b"right")


async def test_a_constraint_waits_for_the_ids_that_it_begins_after(stub: Any, table: TextTable):
    stream = await attached(stub)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("left",)))
    free, _ = await run_out(stream, opening(0, [10, 11, 12], temperature=1.0, seed=5, max_tokens=20, ignore_eos=True))
    stream = await attached(stub, epoch=2)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("left",), begin_after=tuple(free[3:5])))
    output, outcome = await run_out(stream, constrained(0, 1, ignore_eos=True))
    assert outcome == worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE
    assert output[:5] == free[:5]
    assert b"".join(table.tokens[token] for token in output[5:]) == b"left"


@pytest.mark.composes("structured output", "leases")
async def test_in_a_lease_a_complete_row_runs_no_further(stub: Any):
    stream = await attached(stub)
    await prepare(stream, 1, Constraint(ConstraintKind.CHOICE, ("q",)))
    opened = constrained(0, 1)
    await stream.send(1, 0, {0: 2}, opens=[opened])
    assert (await stream.result()).outcome == worker_pb2.BATCH_OUTCOME_FAILED, "a row that is sampled must reach its last token"
    await stream.send(2, 0, {0: 3}, opens=[opened])
    assert (await stream.result()).row_outcomes == bytes([worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE])
    await stream.send(3, 2, {0: 1}, lease_steps=3)
    outcomes = [(await stream.result()).row_outcomes[0] for _ in range(3)]
    assert outcomes[1:] == [worker_pb2.ROW_OUTCOME_NOT_RUN] * 2
