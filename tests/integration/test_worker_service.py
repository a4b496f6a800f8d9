"""The worker service over gRPC: a whole process's life in this one, with a tiny random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs import rpc
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids, unpack_ids
from libs.store.sqlite import SqliteStore
from services.worker.config import WorkerConfig
from services.worker.service import serve
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2, worker_pb2_grpc

WAIT = 60.0


@dataclass
class Worker:
    """A serving worker and how to end it."""

    config: WorkerConfig
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[int] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(serve(self.config, "w-1", self.stop))

    async def registered(self) -> str:
        """Its address, once it is in the store."""
        store = SqliteStore(Path(self.config.store))
        async with asyncio.timeout(WAIT):
            while not (entries := await store.list("workers/")):
                assert self.task is not None
                assert not self.task.done()
                await asyncio.sleep(0.02)
        found = json.loads(entries[0].value)
        assert (entries[0].key, found["instance"]) == (f"workers/{found['address']}", "w-1")
        return str(found["address"])

    async def end(self) -> int:
        self.stop.set()
        assert self.task is not None
        return await asyncio.wait_for(self.task, WAIT)


@pytest.fixture
async def worker(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(
        WorkerConfig(
            model=tiny_llama_dir,
            listen=f"unix:{tmp_path}/worker.sock",
            store=str(tmp_path / "store.db"),
            kv_cache_memory_bytes=16 << 20,
            max_num_seqs=8,
            threads=2,
        )
    )
    worker.start()
    yield worker
    await worker.end()


@pytest.fixture
async def stub(worker: Worker) -> AsyncIterator[Any]:
    async with rpc.connect(await worker.registered()) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


class Stream:
    """One scheduler's stream."""

    def __init__(self, stub: Any, epoch: int, token: int = 1, version: int = rpc.PROTOCOL_VERSION) -> None:
        self.epoch = epoch
        self.call = stub.Run()
        self._hello = worker_pb2.Attach(protocol_version=version, fencing_token=token, epoch=epoch, scheduler=f"s{epoch}")

    async def attach(self) -> worker_pb2.Attached:
        await self.call.write(worker_pb2.RunRequest(attach=self._hello))
        return (await self.read("attached")).attached

    async def read(self, kind: str) -> worker_pb2.RunResponse:
        """The next response but heartbeats (unless one is asked for). Raises the stream's error when it ended."""
        async with asyncio.timeout(WAIT):
            while True:
                try:
                    response = await self.call.read()
                except grpc.aio.AioRpcError as error:
                    raise rpc.error_of(error) from error
                if response is grpc.aio.EOF:
                    await self._raise()
                if response.WhichOneof("kind") == kind:
                    return response
                assert response.HasField("heartbeat")

    async def _raise(self) -> None:
        metadata = await self.call.trailing_metadata()
        error = grpc.aio.AioRpcError(await self.call.code(), await self.call.initial_metadata(), metadata, await self.call.details())
        raise rpc.error_of(error)

    async def send(self, number: int, predecessor: int, rows: dict[int, int], **fields: Any) -> None:
        """Rows are slot: count; every row is sampled and needs no new block."""
        batch = worker_pb2.StepBatch(
            epoch=self.epoch,
            number=number,
            predecessor=predecessor,
            slots=list(rows),
            counts=list(rows.values()),
            samples=b"\1" * len(rows),
            new_block_counts=[0] * len(rows),
            **fields,
        )
        await self.call.write(worker_pb2.RunRequest(batch=batch))

    async def result(self) -> worker_pb2.StepResult:
        return (await self.read("result")).result


def opening(slot: int, prompt: list[int], **sampling: Any) -> worker_pb2.Open:
    return worker_pb2.Open(
        slot=slot,
        request=f"r{slot}",
        prompt_ids=pack_ids(prompt),
        block_ids=pack_ids(range(4 * slot, 4 * slot + 4)),
        sampling=common_pb2.SamplingParams(**({"max_tokens": 30, "top_p": 1.0} | sampling)),
    )


async def ending_of(stream: Stream) -> ErrorCode:
    with pytest.raises(TokenloomError) as caught:
        await stream.read("attached")
    return caught.value.code


async def test_a_scheduler_attaches_and_is_told_what_the_worker_is(stub: Any, tiny_llama_dir: Path):
    attached = await Stream(stub, epoch=7, token=5).attach()
    facts = attached.facts
    assert (attached.epoch, attached.highest_fencing_token, attached.protocol_version) == (7, 5, rpc.PROTOCOL_VERSION)
    assert attached.boot_id
    assert (facts.block_size, facts.num_slots, facts.max_in_flight, facts.feed_forward_distance) == (16, 8, 2, 1)
    assert (facts.kv_dtype, facts.device, facts.max_model_len) == ("float32", "cpu", 512)
    assert (facts.vocab_size, facts.logits_width, list(facts.eos_token_ids)) == (266, 272, [2, 0])
    assert facts.num_blocks * facts.block_bytes <= 16 << 20
    assert facts.max_tokens_per_step >= facts.max_model_len
    assert all((facts.fingerprints.model, facts.fingerprints.tokenizer, facts.fingerprints.numerics))


@pytest.mark.composes("greedy", "dispatch-ahead")
async def test_tokens_are_generated_with_batches_sent_ahead(stub: Any):
    stream = Stream(stub, epoch=1)
    await stream.attach()
    await stream.send(1, 0, {0: 3, 1: 5}, opens=[opening(0, [10, 11, 12]), opening(1, [20, 21, 22, 23, 24])])
    await stream.send(2, 1, {0: 1, 1: 1})
    outputs: list[list[int]] = [[], []]
    for number in range(1, 9):
        result = await stream.result()
        assert (result.number, result.outcome) == (number, worker_pb2.BATCH_OUTCOME_OK)
        for output, token in zip(outputs, unpack_ids(result.token_ids), strict=True):
            output.append(token)
        if number < 7:
            await stream.send(number + 2, number + 1, {0: 1, 1: 1})
    again = Stream(stub, epoch=2)
    await again.attach()
    await again.send(1, 0, {3: 9}, opens=[resumed(outputs[1])])
    assert unpack_ids((await again.result()).token_ids) == [outputs[1][4]], "replay on a clean worker continues alike"


def resumed(output: list[int]) -> worker_pb2.Open:
    message = opening(3, [20, 21, 22, 23, 24])
    message.output_ids = pack_ids(output[:4])
    return message


@pytest.mark.composes("seed")
async def test_a_seed_gives_the_same_tokens_in_any_slot_and_company(stub: Any):
    async def draw(epoch: int, companions: int) -> list[int]:
        stream = Stream(stub, epoch=epoch)
        await stream.attach()
        slots = dict.fromkeys(range(companions + 1), 4)
        opens = [opening(slot, [30 + slot * (slot != companions), 31, 32, 33], temperature=1.5, seed=99) for slot in slots]
        await stream.send(1, 0, slots, opens=opens)
        tokens = [unpack_ids((await stream.result()).token_ids)[-1]]
        for number in range(2, 12):
            await stream.send(number, number - 1, dict.fromkeys(slots, 1))
            tokens.append(unpack_ids((await stream.result()).token_ids)[-1])
        return tokens

    assert await draw(1, 0) == await draw(2, 5)


async def test_an_older_token_is_refused_and_a_newer_one_takes_over(stub: Any):
    first = Stream(stub, epoch=1, token=4)
    await first.attach()
    with pytest.raises(TokenloomError) as caught:
        await Stream(stub, epoch=2, token=3).attach()
    assert caught.value.code is ErrorCode.STALE_FENCING_TOKEN
    second = Stream(stub, epoch=3, token=5)
    await second.attach()
    assert await ending_of(first) is ErrorCode.STALE_FENCING_TOKEN
    refused = stub.Run()
    await refused.write(worker_pb2.RunRequest(attach=worker_pb2.Attach(protocol_version=1, fencing_token=2, epoch=9)))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        assert [response async for response in refused] == []
    refusal = rpc.detail_of(ended.value, worker_pb2.FencingRefusal)
    assert refusal is not None
    assert refusal.highest_fencing_token == 5
    third = Stream(stub, epoch=4, token=5)
    await third.attach()
    assert await ending_of(second) is ErrorCode.SESSION_LOST


@pytest.mark.parametrize(
    ("version", "answer"), [(0, None), (rpc.PROTOCOL_VERSION + 1, rpc.PROTOCOL_VERSION), (rpc.PROTOCOL_VERSION + 2, None)]
)
async def test_one_release_of_skew_is_served(stub: Any, version: int, answer: int | None):
    stream = Stream(stub, epoch=1, version=version)
    if answer is not None:
        assert (await stream.attach()).protocol_version == answer
        return
    with pytest.raises(TokenloomError) as caught:
        await stream.attach()
    assert caught.value.code is ErrorCode.PROTOCOL_VERSION


async def test_a_stream_begins_with_an_attach_and_has_one_only(stub: Any):
    stream = Stream(stub, epoch=1)
    await stream.send(1, 0, {})
    assert await ending_of(stream) is ErrorCode.PROTOCOL_VIOLATION
    twice = Stream(stub, epoch=2)
    await twice.attach()
    await twice.call.write(worker_pb2.RunRequest(attach=worker_pb2.Attach(protocol_version=1, fencing_token=1, epoch=3)))
    assert await ending_of(twice) is ErrorCode.PROTOCOL_VIOLATION


async def test_a_worker_whose_scheduler_vanished_takes_the_next(stub: Any):
    lost = Stream(stub, epoch=1)
    await lost.attach()
    await lost.send(1, 0, {0: 3}, opens=[opening(0, [10, 11, 12])])
    lost.call.cancel()
    fresh = Stream(stub, epoch=2)
    await fresh.attach()
    await fresh.send(1, 0, {0: 1})
    assert list((await fresh.result()).row_outcomes) == [worker_pb2.ROW_OUTCOME_NOT_RUN], "slots were cleared"


async def test_a_heartbeat_comes_while_nothing_runs(stub: Any):
    stream = Stream(stub, epoch=6)
    await stream.attach()
    beat = (await stream.read("heartbeat")).heartbeat
    assert (beat.epoch, beat.last_step, beat.running_step) == (6, 0, 0)


async def test_health_says_serving_once_loaded_and_reflection_lists_the_service(worker: Worker):
    async with rpc.connect(await worker.registered()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="tokenloom.worker.v1.WorkerService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_shutting_down_ends_the_stream_as_draining_and_leaves_the_registry(worker: Worker, stub: Any):
    stream = Stream(stub, epoch=1)
    await stream.attach()
    await stream.send(1, 0, {0: 3}, opens=[opening(0, [10, 11, 12])])
    assert (await stream.result()).outcome == worker_pb2.BATCH_OUTCOME_OK
    code = asyncio.create_task(worker.end())
    assert await ending_of(stream) is ErrorCode.DRAINING
    assert await code == 0
    assert await SqliteStore(Path(worker.config.store)).list("workers/") == []


async def test_a_model_that_cannot_be_served_ends_the_process_with_a_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = WorkerConfig(model=tmp_path, listen=f"unix:{tmp_path}/w.sock")
    assert await serve(config, "w", asyncio.Event()) == 1
    output = capfd.readouterr()
    assert "GPT2LMHeadModel" in output.out + output.err


async def test_an_address_that_is_taken_ends_the_process(tiny_llama_dir: Path, tmp_path: Path):
    config = WorkerConfig(model=tiny_llama_dir, listen=f"unix:{tmp_path}/no/such/folder.sock")
    assert await serve(config, "w", asyncio.Event()) == 1


async def exhaust(call: Any) -> None:
    """Reads until the call ends by an error."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_bytes_that_are_no_message_end_the_stream_and_nothing_else(worker: Worker, stub: Any):
    attach = worker_pb2.RunRequest(attach=worker_pb2.Attach(protocol_version=rpc.PROTOCOL_VERSION, fencing_token=1, epoch=1))
    async with rpc.connect(await worker.registered()) as channel, asyncio.timeout(WAIT):
        call = channel.stream_stream("/tokenloom.worker.v1.WorkerService/Run", request_serializer=bytes, response_deserializer=bytes)()
        await call.write(attach.SerializeToString())
        assert worker_pb2.RunResponse.FromString(await call.read()).HasField("attached")
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exhaust(call)
    assert rpc.error_of(caught.value).code is ErrorCode.PROTOCOL_VIOLATION
    assert (await Stream(stub, epoch=2).attach()).epoch == 2


async def test_batches_of_another_epoch_do_not_use_up_the_stream(stub: Any):
    stream = Stream(stub, epoch=1)
    await stream.attach()
    for number in range(1, 5):
        await stream.call.write(worker_pb2.RunRequest(batch=worker_pb2.StepBatch(epoch=9, number=number)))
        assert (await stream.result()).outcome == worker_pb2.BATCH_OUTCOME_NOT_RUN
    await stream.send(1, 0, {0: 3}, opens=[opening(0, [10, 11, 12])])
    assert (await stream.result()).outcome == worker_pb2.BATCH_OUTCOME_OK
