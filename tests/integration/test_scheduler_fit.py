"""What fits the cache alone is served whatever else happens; what can never fit is told so, at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.errors import ErrorCode
from libs.packing import pack_ids
from services.scheduler.core.request import WaitReason
from tests.support.core import RULES
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2

LENGTH = RULES.max_model_len


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def ending_of(session: SessionClient, number: int) -> scheduler_pb2.Ending:
    ending = (await session.ended(number)).ending
    assert ending is not None
    return ending


async def test_a_prompt_one_token_short_of_the_limit_has_one_output_token(mesh: SchedulerMesh):
    await mesh.worker(blocks=8)
    session = await (await mesh.session()).ready()
    prompt = [1] * (LENGTH - 1)
    await session.submit(1, prompt, params(max_tokens=50))
    ending = await ending_of(session, 1)
    assert (ending.reason, ending.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 1)


@pytest.mark.parametrize("excess", [0, 1, 100])
async def test_a_prompt_at_the_limit_or_over_it_is_refused_before_it_is_queued(mesh: SchedulerMesh, excess: int):
    worker = await mesh.worker(blocks=8)
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * (LENGTH + excess), params(max_tokens=1))
    ending = await ending_of(session, 1)
    assert ErrorCode.from_number(ending.error.code) is ErrorCode.PROMPT_TOO_LONG
    assert f"{LENGTH + excess} tokens" in ending.error.message
    assert (ending.was_accepted, worker.batches) == (False, [])


async def test_max_tokens_beyond_the_context_end_at_its_length(mesh: SchedulerMesh):
    await mesh.worker(blocks=8)
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 100, params(max_tokens=1000))
    got = await session.ended(1)
    assert got.tokens == expected_output(RULES, [1] * 100, params(max_tokens=1000))
    assert len(got.tokens) == LENGTH - 100


@pytest.mark.composes("preemption", "seed")
async def test_requests_that_each_fill_the_cache_are_served_one_after_the_other_and_none_fails(mesh: SchedulerMesh):
    await mesh.worker(blocks=LENGTH // 16)
    session = await (await mesh.session()).ready()
    wanted = {number: ([number] * (20 + 15 * number), params(seed=number, max_tokens=LENGTH)) for number in range(1, 7)}
    for number, (prompt, sampling) in wanted.items():
        await session.submit(number, prompt, sampling)
    for number, (prompt, sampling) in wanted.items():
        got = await session.ended(number)
        assert got.tokens == expected_output(RULES, prompt, sampling)
    assert mesh.state.counters.failed == 0
    assert mesh.state.counters.preemptions > 0


SHORT, LONG = params(seed=1, max_tokens=10), params(seed=2, max_tokens=60)


async def smaller_worker_comes_back(mesh: SchedulerMesh) -> SessionClient:
    """Three requests lose the only worker; the one that comes back holds the first of them."""
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 20, SHORT)
    await session.submit(2, [2] * 20, LONG)
    await session.submit(3, [3] * 70, SHORT)
    await worker.wait_batches(1)
    await worker.stop()
    await mesh.worker(max_model_len=64, blocks=4)
    assert (await session.ended(1)).tokens == expected_output(RULES, [1] * 20, SHORT)
    return session


@pytest.mark.composes("worker loss", "seed")
async def test_when_a_smaller_worker_comes_back_first_who_needs_more_waits_for_a_larger_one(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        session = await smaller_worker_comes_back(mesh)
        assert [request.key.id for request in mesh.state.queue] == [2, 3]
        assert {request.wait_reason for request in mesh.state.queue} == {WaitReason.GROUP_TOO_SMALL}
        await mesh.worker(1)
        assert (await session.ended(2)).tokens == expected_output(RULES, [2] * 20, LONG)
        assert (await session.ended(3)).tokens == expected_output(RULES, [3] * 70, SHORT)


@pytest.mark.composes("worker loss", "seed")
async def test_when_only_a_smaller_worker_comes_back_what_no_longer_fits_is_told_so_after_the_grace(mesh: SchedulerMesh):
    session = await smaller_worker_comes_back(mesh)
    mesh.pass_grace()
    for number in (2, 3):
        ending = await ending_of(session, number)
        assert ErrorCode.from_number(ending.error.code) is ErrorCode.CANNOT_FIT
        assert ending.error.message.endswith("tokens of KV cache; a worker holds 64")


async def resumed_where_it_does_not_fit(mesh: SchedulerMesh) -> SessionClient:
    """Another scheduler's request, which had begun with three tokens, comes to a mesh whose only worker is too small for the rest."""
    await mesh.worker(max_model_len=64, blocks=4)
    session = await (await mesh.session()).ready()
    begun = expected_output(RULES, [2] * 20, LONG)[:3]
    await session.submit(2, [2] * 20, LONG, attempt=1, output_ids=pack_ids(begun))
    await session.submit(4, [4] * 20, SHORT)
    assert (await session.ended(4)).tokens == expected_output(RULES, [4] * 20, SHORT), "it was in somebody's way"
    (request,) = mesh.state.queue
    assert (request.wait_reason, request.stops.max_output) == (WaitReason.GROUP_TOO_SMALL, LONG.max_tokens)
    return session


@pytest.mark.composes("worker loss", "seed")
async def test_a_resumed_request_is_not_cut_short_by_a_smaller_context_but_waits_for_a_larger_worker(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        session = await resumed_where_it_does_not_fit(mesh)
        await mesh.worker(1)
        got = await session.ended(2)
        assert got.tokens == expected_output(RULES, [2] * 20, LONG)
        assert got.ending is not None
        assert got.ending.completion_tokens == LONG.max_tokens


async def test_a_resumed_request_that_no_worker_holds_within_the_grace_fails_by_name(mesh: SchedulerMesh):
    session = await resumed_where_it_does_not_fit(mesh)
    mesh.pass_grace()
    ending = await ending_of(session, 2)
    assert ErrorCode.from_number(ending.error.code) is ErrorCode.CANNOT_FIT
    assert ending.error.message.endswith("need 80 tokens of KV cache; a worker holds 64")


async def test_a_resumed_request_whose_prompt_alone_no_longer_fits_waits_too(mesh: SchedulerMesh):
    await mesh.worker(max_model_len=64, blocks=4)
    session = await (await mesh.session()).ready()
    await session.submit(3, [3] * 70, SHORT, attempt=2)
    await mesh.until(lambda: mesh.state.requests)
    assert [request.wait_reason for request in mesh.state.queue] == [WaitReason.GROUP_TOO_SMALL]
    mesh.pass_grace()
    assert ErrorCode.from_number((await ending_of(session, 3)).error.code) is ErrorCode.CANNOT_FIT


async def test_the_worker_that_came_back_smaller_decides_what_is_accepted(mesh: SchedulerMesh):
    session = await smaller_worker_comes_back(mesh)
    assert session.model is not None
    assert session.model.max_model_len == 64
    assert session.window.max_outstanding_tokens == 64 * session.window.max_outstanding
    await session.submit(4, [4] * 64, SHORT)
    assert ErrorCode.from_number((await ending_of(session, 4)).error.code) is ErrorCode.PROMPT_TOO_LONG
    await session.submit(5, [5] * 60, SHORT)
    assert (await ending_of(session, 5)).completion_tokens == 4
    for number in (2, 3):
        await session.cancel(number)


async def test_the_only_worker_may_come_back_larger(mesh: SchedulerMesh):
    worker = await mesh.worker(max_model_len=64, blocks=8)
    session = await (await mesh.session()).ready()
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    await mesh.worker(max_model_len=128)
    await mesh.until(lambda: mesh.state.groups)
    await session.submit(1, [1] * 100, params(max_tokens=5))
    assert (await ending_of(session, 1)).completion_tokens == 5


@pytest.mark.composes("several workers")
async def test_a_worker_with_fewer_blocks_takes_its_part(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        await mesh.worker(0, blocks=64)
        await mesh.worker(1, blocks=8)
        session = await (await mesh.session()).ready()
        await mesh.until(lambda: len(mesh.state.groups) == 2)
        for number in range(1, 13):
            await session.submit(number, [number] * 40, params(seed=number, max_tokens=LENGTH))
        for number in range(1, 13):
            assert (await session.ended(number)).tokens == expected_output(RULES, [number] * 40, params(seed=number, max_tokens=LENGTH))
