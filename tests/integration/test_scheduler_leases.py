"""Multi-step leases over real gRPC: granted when all decode, cut when somebody comes or goes, and never a wrong or a late token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.core import RULES
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

LONG = params(max_tokens=100)
LONG_OUTPUT = expected_output(RULES, [1] * 5, LONG)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path, max_lease_steps=8) as mesh:
        yield mesh


async def frozen_in_a_lease(mesh: SchedulerMesh, worker: FakeWorker) -> SessionClient:
    """A session whose request 1, of 100 tokens, runs in a lease of 8 steps. The worker stands still in the third, as is known."""
    frozen: list[int] = []

    def freeze(result: worker_pb2.StepResult) -> worker_pb2.StepResult:
        batch = next(batch for batch in reversed(worker.batches) if batch.number <= result.number)
        if not frozen and batch.lease_steps == 8 and result.number == batch.number + 1:
            frozen.append(result.number)
            worker.gate.clear()
        return result

    worker.answer = freeze
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 5, LONG)
    await mesh.until(
        lambda: frozen and frozen == [group.in_flight[0].number - 1 for group in mesh.state.groups.values() if group.in_flight]
    )
    return session


async def test_decodes_of_several_steps_travel_in_one_message_and_come_back_one_by_one(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 5, LONG)
    assert (await session.ended(1)).tokens == LONG_OUTPUT
    granted = [batch.lease_steps for batch in worker.batches if batch.slots]
    assert sum(granted) == 100
    assert max(granted) == 8
    assert len(granted) < 50
    assert worker.cuts == []
    assert mesh.state.counters.steps >= 100
    assert await mesh.sample("leases_total") == sum(steps > 1 for steps in granted)
    assert await mesh.sample("lease_steps_sum") == sum(batch.lease_steps for batch in worker.batches)


async def test_with_leases_of_one_step_every_step_is_a_message_of_its_own(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=1) as mesh:
        worker = await mesh.worker()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1] * 5, LONG)
        await session.ended(1)
        assert {batch.lease_steps for batch in worker.batches} == {1}
        assert await mesh.sample("leases_total") == 0


@pytest.mark.composes("leases", "dispatch-ahead")
async def test_the_next_batch_is_sent_while_the_last_step_of_a_lease_runs(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.02)
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 5, LONG)
    await session.ended(1)
    assert worker.overlaps >= 5


@pytest.mark.composes("leases", "chunked prefill")
async def test_an_arrival_cuts_the_lease_and_is_prefilled_next(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await frozen_in_a_lease(mesh, worker)
    lease, before = worker.batches[-1], len(worker.batches)
    await session.submit(2, [2] * 80, params(max_tokens=3))
    await worker.wait_cuts(1)
    assert (worker.cuts[0].number, worker.cuts[0].last_step) == (lease.number, lease.number + 2)
    await mesh.until(lambda: mesh.state.counters.cut_leases == 1)
    worker.gate.set()
    assert (await session.ended(2)).tokens == expected_output(RULES, [2] * 80, params(max_tokens=3))
    assert [opened.request for opened in worker.batches[before].opens], "the batch behind the cut admits the newcomer"
    assert (await session.ended(1)).tokens == LONG_OUTPUT
    assert len(worker.cuts) == 1
    assert mesh.state.counters.stale_closed == 0


@pytest.mark.composes("leases", "cancel")
async def test_a_cancel_cuts_the_lease_and_its_blocks_are_free_once_the_running_step_ends(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await frozen_in_a_lease(mesh, worker)
    ran = len(worker.model.steps)
    await session.cancel(1)
    await worker.wait_cuts(1)
    worker.gate.set()
    assert (await session.ended(1)).ending.reason == common_pb2.FINISH_REASON_CANCELLED
    await mesh.settled()
    assert sum(rows for rows, _ in worker.model.steps[ran:]) == 1, "more than the step that was running ran"
    assert await mesh.sample("cut_leases_total") == 1
    assert await mesh.sample("cancel_to_free_seconds_count") == 1


@pytest.mark.composes("leases", "bounded queue")
async def test_a_worker_that_hears_no_cut_keeps_an_arrival_waiting_until_the_lease_ends(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002, deaf=True)
    session = await frozen_in_a_lease(mesh, worker)
    await session.submit(2, [2] * 9, params(max_tokens=3))
    await worker.wait_cuts(1)
    worker.gate.set()
    assert (await session.ended(2)).tokens == expected_output(RULES, [2] * 9, params(max_tokens=3))
    assert (await session.ended(1)).tokens == LONG_OUTPUT
    assert mesh.state.counters.cut_leases == 0


async def test_nobody_is_cut_for_an_arrival_that_finds_no_slot(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=8, max_num_seqs=1) as mesh:
        worker = await mesh.worker(step_seconds=0.002)
        session = await frozen_in_a_lease(mesh, worker)
        await session.submit(2, [2] * 9, params(max_tokens=3))
        await mesh.until(lambda: len(mesh.state.requests) == 2)
        worker.gate.set()
        await session.ended(2)
        assert (await session.ended(1)).tokens == LONG_OUTPUT
        assert worker.cuts == []


@pytest.mark.composes("leases", "worker loss")
async def test_a_worker_that_dies_within_a_lease_costs_no_token(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await frozen_in_a_lease(mesh, worker)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    await mesh.worker()
    assert (await session.ended(1)).tokens == LONG_OUTPUT


@pytest.mark.composes("leases", "failed batches")
async def test_a_step_that_fails_within_a_lease_is_replayed(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await frozen_in_a_lease(mesh, worker)
    worker.fail_steps = 1
    worker.gate.set()
    assert (await session.ended(1)).tokens == LONG_OUTPUT
    assert worker.fail_steps == 0
    assert mesh.state.counters.resumed == 1


@pytest.mark.composes("leases", "deadline")
async def test_no_lease_goes_beyond_the_next_deadline(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=64) as mesh:
        worker = await mesh.worker(step_seconds=0.03)
        session = await (await mesh.session()).ready()
        await session.submit(1, [1] * 5, LONG, deadline_remaining_us=300_000)
        ended = await session.ended(1)
        assert ended.ending.reason == common_pb2.FINISH_REASON_DEADLINE
        assert all(batch.lease_steps * 0.03 <= 0.3 for batch in worker.batches)


@pytest.mark.composes("leases", "stop strings", "seed", "several gateways")
async def test_requests_that_stop_within_leases_stop_at_their_token(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.001)
    sessions = [await (await mesh.session(gateway)).ready() for gateway in (77, 78)]
    wanted = {}
    for number in range(1, 9):
        sampling = params(
            max_tokens=60, seed=number, temperature=1.0, ignore_eos=number % 2 == 0, stop=("ab", "q") if number % 3 == 0 else ()
        )
        wanted[number] = expected_output(RULES, [number] * 7, sampling)
        await sessions[number % 2].submit(number, [number] * 7, sampling)
    for number, tokens in wanted.items():
        assert (await sessions[number % 2].ended(number)).tokens == tokens
    assert any(batch.lease_steps > 1 for batch in worker.batches)


@pytest.mark.composes("leases", "preemption", "prefix caching")
async def test_leases_in_a_cache_that_is_too_small_take_nobodys_place(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=8) as mesh:
        await mesh.worker(step_seconds=0.001, blocks=12)
        session = await (await mesh.session()).ready()
        wanted = {}
        for number in range(1, 7):
            wanted[number] = expected_output(RULES, [5] * 20 + [number], params(max_tokens=60, seed=number))
            await session.submit(number, [5] * 20 + [number], params(max_tokens=60, seed=number))
        for number, tokens in wanted.items():
            assert (await session.ended(number)).tokens == tokens
        assert mesh.state.counters.preemptions > 0
        assert mesh.state.counters.leases > 0
