"""Workers come, go, hang, lie and fail under a real scheduler; requests go on token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.store.sqlite import SqliteStore
from services.scheduler import workers
from services.scheduler.core.request import WaitReason
from tests.support.core import RULES
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def submit_some(session: SessionClient, count: int, **sampling: object) -> dict[int, list[int]]:
    """Submits requests; returns what each must yield."""
    wanted = {}
    for number in range(1, count + 1):
        prompt = [number] * (number * 3)
        wanted[number] = expected_output(RULES, prompt, params(seed=number, **sampling))
        await session.submit(number, prompt, params(seed=number, **sampling))
    return wanted


async def all_exact(session: SessionClient, wanted: dict[int, list[int]]) -> None:
    for number, tokens in wanted.items():
        assert (await session.ended(number)).tokens == tokens


@pytest.mark.composes("dispatch-ahead")
async def test_the_next_batch_is_sent_while_the_last_one_runs(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=1) as mesh:
        worker = await mesh.worker(step_seconds=0.02)
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params(max_tokens=15))
        await session.ended(1)
        assert worker.overlaps >= 5
        assert await mesh.sample("dispatch_lead_seconds_sum") > 0
        assert await mesh.sample("dispatch_lead_seconds_count") == 15


async def test_with_no_margin_nothing_is_sent_ahead(tmp_path: Path):
    async with SchedulerMesh(tmp_path, dispatch_margin_ms=0) as mesh:
        worker = await mesh.worker(step_seconds=0.005)
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params(max_tokens=8))
        await session.ended(1)
        assert worker.overlaps == 0


@pytest.mark.composes("worker loss")
@pytest.mark.parametrize("after", [1, 4])
async def test_a_worker_that_dies_and_comes_back_costs_a_pause_and_no_token(mesh: SchedulerMesh, after: int):
    worker = await mesh.worker(step_seconds=0.002)
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 4)
    await worker.wait_batches(after)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    assert len(mesh.state.queue) == len(mesh.state.requests)
    await mesh.worker()
    await all_exact(session, wanted)
    assert await mesh.sample("worker_losses_total") == 1
    assert mesh.state.counters.finished == 4


async def test_nobody_waits_for_a_worker_once_it_is_back(mesh: SchedulerMesh):
    worker = await mesh.worker(slots=1, gate=asyncio.Event())
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 4)
    await worker.wait_batches(1)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    assert [request.wait_reason for request in mesh.state.queue] == [WaitReason.NO_WORKER] * 4
    worker = await mesh.worker(slots=1, gate=asyncio.Event())
    await worker.wait_batches(1)
    assert [request.wait_reason for request in mesh.state.queue] == [WaitReason.BEHIND] * 3
    worker.gate.set()
    await all_exact(session, wanted)


@pytest.mark.composes("several workers", "worker loss")
async def test_requests_move_to_another_worker(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        first = await mesh.worker(0)
        first.gate.clear()
        session = await (await mesh.session()).ready()
        wanted = await submit_some(session, 3)
        await first.wait_batches(1)
        await mesh.worker(1)
        await mesh.until(lambda: len(mesh.state.groups) == 2)
        await first.stop()
        await all_exact(session, wanted)


@pytest.mark.composes("failed batches")
async def test_a_failed_batch_is_replayed_without_a_trace_in_the_output(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    worker.fail_steps = 2
    wanted = await submit_some(session, 4)
    await all_exact(session, wanted)
    assert mesh.state.counters.resumed > 0


async def test_a_request_that_breaks_every_batch_fails_alone(mesh: SchedulerMesh):
    worker = await mesh.worker()

    def refuse_number_three(result: worker_pb2.StepResult) -> worker_pb2.StepResult:
        if any(opened.request == "4d:3" for batch in worker.batches for opened in batch.opens if batch.number == result.number):
            return worker_pb2.StepResult(epoch=result.epoch, number=result.number, outcome=worker_pb2.BATCH_OUTCOME_FAILED)
        return result

    worker.answer = refuse_number_three
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 4, max_tokens=3)
    await worker.wait_batches(1)
    worker.gate.set()
    ending = (await session.ended(3)).ending
    assert ending is not None
    assert ErrorCode.from_number(ending.error.code) is ErrorCode.POISON_REQUEST
    del wanted[3]
    await all_exact(session, wanted)


async def test_nonsense_from_a_worker_ends_its_stream_and_not_the_requests(mesh: SchedulerMesh):
    worker = await mesh.worker()

    def spoil_once(result: worker_pb2.StepResult) -> worker_pb2.StepResult:
        if result.number == 2 and len(worker.attaches) == 1:
            result.token_ids = b"abc"
        return result

    worker.answer = spoil_once
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 2)
    await all_exact(session, wanted)
    assert len(worker.attaches) == 2


async def test_a_worker_that_refuses_a_batch_without_predecessor_is_attached_anew(mesh: SchedulerMesh):
    worker = await mesh.worker(refuse_steps=1)
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 2)
    await all_exact(session, wanted)
    assert len(worker.attaches) == 2
    assert worker.attaches[1].epoch > worker.attaches[0].epoch


@pytest.mark.composes("several workers", "worker loss")
async def test_a_hung_worker_is_dropped_and_its_requests_go_elsewhere(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2, step_timeout=1.0) as mesh:
        hung = await mesh.worker(0)
        hung.gate.clear()
        session = await (await mesh.session()).ready()
        wanted = await submit_some(session, 2)
        await hung.wait_batches(1)
        await mesh.worker(1)
        await mesh.until(lambda: len(mesh.state.groups) == 2)
        hung.running_us = 1_500_000
        await mesh.until(lambda: mesh.worker_address(0) not in mesh.state.groups)
        hung.gate.set()
        await all_exact(session, wanted)
        assert await mesh.sample("worker_losses_total") == 1


async def test_a_silent_worker_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "HEARTBEAT_TIMEOUT", 0.05)
    async with SchedulerMesh(tmp_path) as mesh:
        worker = await mesh.worker(beat_seconds=60.0)
        await worker.wait_attaches(2)
        worker.beat_seconds = 0.01
        await mesh.until(lambda: mesh.process.links[mesh.worker_address()].heartbeat.epoch == worker.attaches[-1].epoch)
        assert await mesh.sample("worker_losses_total") >= 1


async def test_a_worker_is_found_in_the_store(tmp_path: Path):
    store = SqliteStore(tmp_path / "store.db")
    async with SchedulerMesh(tmp_path, static_workers=0, store=str(tmp_path / "store.db")) as mesh:
        session = await mesh.session()
        await mesh.worker(7)
        await store.put("workers/broken", "[]", ttl_seconds=0.01)
        await store.put("workers/w7", json.dumps({"address": mesh.worker_address(7)}), ttl_seconds=60)
        await session.ready()
        await session.submit(1, [1], params(max_tokens=3))
        assert len((await session.ended(1)).tokens) == 3
        assert list(mesh.state.groups) == [mesh.worker_address(7)]


async def test_a_vanished_worker_is_forgotten_and_an_attached_one_is_not(tmp_path: Path):
    store = SqliteStore(tmp_path / "store.db")
    async with SchedulerMesh(tmp_path, static_workers=0, store=str(tmp_path / "store.db")) as mesh:
        worker = await mesh.worker(7)
        await store.put("workers/w7", json.dumps({"address": mesh.worker_address(7)}), ttl_seconds=60)
        await (await mesh.session()).ready()
        await store.delete("workers/w7")
        await store.put("workers/w8", json.dumps({"address": mesh.worker_address(8)}), ttl_seconds=60)
        await mesh.until(lambda: mesh.worker_address(8) in mesh.process.links)
        assert mesh.worker_address(7) in mesh.process.links
        await worker.stop()
        await mesh.until(lambda: mesh.worker_address(7) not in mesh.process.links)


@pytest.mark.refuses("several workers", at="start", reason="where model, tokenizer, numerics, KV dtype, length or block size differ")
async def test_a_second_worker_of_another_kind_is_refused_and_the_first_serves_on(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        await mesh.worker(0)
        session = await (await mesh.session()).ready()
        other = await mesh.worker(1, max_model_len=64)
        await other.wait_attaches(2)
        assert list(mesh.state.groups) == [mesh.worker_address(0)]
        await session.submit(1, [1], params(max_tokens=3))
        assert len((await session.ended(1)).tokens) == 3
        assert other.batches == []


async def test_a_first_worker_with_another_tokenizer_leaves_the_scheduler_not_ready(mesh: SchedulerMesh):
    worker = await mesh.worker(fingerprint="another")
    session = await mesh.session()
    await worker.wait_attaches(2)
    assert not session.window.ready
    assert mesh.engine.state is None


async def test_a_leader_that_loses_its_worker_to_a_higher_token_steps_down(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    worker.gate.clear()
    await session.submit(1, [1], params())
    await worker.wait_batches(1)
    token = mesh.engine.fencing_token
    worker.highest_token = token + 5
    await worker.end_stream(TokenloomError(ErrorCode.STALE_FENCING_TOKEN, "a new leader attached"))
    await asyncio.wait_for(mesh.engine.superseded.wait(), 10)
    assert mesh.engine.fencing_token == token, "it does not fight for the worker"
    await session.cancel(1)
    await session.ended(1)
    worker.gate.set()


async def test_a_fencing_token_that_is_too_low_is_raised(mesh: SchedulerMesh):
    worker = await mesh.worker(highest_token=mesh.engine.fencing_token + 3)
    before = mesh.engine.fencing_token
    session = await (await mesh.session()).ready()
    assert mesh.engine.fencing_token >= before + 3
    assert worker.attaches[-1].fencing_token == mesh.engine.fencing_token
    epochs = [attach.epoch for attach in worker.attaches]
    assert epochs == sorted(set(epochs))
    await session.submit(1, [1], params(max_tokens=1))
    await session.ended(1)


async def test_of_two_schedulers_with_one_store_the_later_one_leads_and_the_earlier_one_steps_down_at_once(tmp_path: Path):
    """The earlier one's link was down meanwhile. It used to raise its token and depose the later one, which came back and deposed it."""
    (tmp_path / "later").mkdir()
    store = str(tmp_path / "store.db")
    async with SchedulerMesh(tmp_path, store=store) as first:
        token = first.engine.fencing_token
        async with SchedulerMesh(tmp_path / "later", store=store) as second:
            worker = await first.worker(highest_token=second.engine.fencing_token)
            await asyncio.wait_for(first.process.deposed(), 10)
            assert first.engine.fencing_token == token, "it fights"
            assert [attach.fencing_token for attach in worker.attaches] == [token]
            assert not second.engine.superseded.is_set()


async def test_without_a_worker_submits_are_refused_with_the_reason(mesh: SchedulerMesh):
    session = await mesh.session()
    await session.until(lambda: session.frames)
    assert (session.window.ready, session.window.not_ready_reason) == (False, "no worker has been attached yet")
    assert session.model is None
    await session.submit(1, [1], params())
    ending = (await session.ended(1)).ending
    assert ending is not None
    assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (ErrorCode.NO_WORKER, False)
    assert ending.error.retry_after_ms


async def test_when_no_worker_comes_back_in_time_what_waits_fails_and_what_comes_is_refused(tmp_path: Path):
    async with SchedulerMesh(tmp_path, worker_grace=0.3) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        assert session.model is not None
        await session.submit(1, [1], params())
        await worker.wait_batches(1)
        await worker.stop()
        ending = (await session.ended(1)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (ErrorCode.NO_WORKER, True)
        await session.until(lambda: not session.window.ready)
        await session.submit(2, [1], params())
        ending = (await session.ended(2)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (ErrorCode.NO_WORKER, False)
        await mesh.worker()
        await session.ready()
        await session.submit(3, [1], params(max_tokens=2))
        assert len((await session.ended(3)).tokens) == 2


async def test_a_request_that_comes_while_the_worker_is_away_waits_for_it(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    await session.submit(1, [1], params(max_tokens=3))
    await session.until(lambda: session.received[1].accepted)
    assert await mesh.sample("num_requests_waiting_by_reason", reason="no_worker") == 1
    await mesh.worker()
    assert len((await session.ended(1)).tokens) == 3


async def test_a_worker_that_drains_accuses_nobody(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 3)
    await worker.wait_batches(1)
    await worker.drain()
    await mesh.until(lambda: not mesh.state.groups)
    assert not mesh.state.quarantine.suspects
    await mesh.worker()
    await all_exact(session, wanted)


async def test_a_worker_that_closes_its_stream_is_dialled_again(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    wanted = await submit_some(session, 2)
    await worker.end_stream()
    await worker.wait_attaches(2)
    await all_exact(session, wanted)


@pytest.mark.composes("cancel", "worker loss")
async def test_a_cancel_while_no_worker_is_there_ends_the_request(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params())
    await worker.wait_batches(1)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    await session.cancel(1)
    ending = (await session.ended(1)).ending
    assert ending is not None
    assert ending.reason == common_pb2.FINISH_REASON_CANCELLED


@pytest.mark.composes("worker loss", "seed")
async def test_a_worker_that_owes_an_answer_and_sends_the_next_one_is_attached_anew(mesh: SchedulerMesh):
    worker = await mesh.worker()

    def skip_the_third(result: worker_pb2.StepResult) -> worker_pb2.StepResult:
        result.number += result.number == 3 and len(worker.attaches) == 1
        return result

    worker.answer = skip_the_third
    session = await (await mesh.session()).ready()
    await all_exact(session, await submit_some(session, 2))
    assert len(worker.attaches) == 2
