"""Constrained requests through a real scheduler over real gRPC: checked before they queue, opened where their constraint is compiled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from libs.telemetry.tracing import TraceParent
from services.scheduler.core import checks
from services.scheduler.core.request import RequestState, WaitReason
from tests.support.core import RULES
from tests.support.gateway_session import SessionClient
from tests.support.model_constraints import multiples
from tests.support.model_worker import EOS, expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2

SEVENS = multiples(7, 12, param="response_format.json_schema.schema")
INVALID = TokenloomError(ErrorCode.INVALID_CONSTRAINT, "no such schema")
BUSY = TokenloomError(ErrorCode.CONSTRAINT_BUSY, "too many wait", retry_after_ms=1000)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def submit(session: SessionClient, number: int, constraint: Constraint = SEVENS, *, prompt: int = 3, **fields: Any) -> list[int]:
    """Submits a constrained request; returns what it must yield."""
    ids, sampling = [number] * prompt, params(seed=number, max_tokens=60)
    await session.submit(number, ids, sampling, constraint=constraint.to_proto(), **fields)
    return expected_output(RULES, ids, sampling, constraint)


async def all_complete(session: SessionClient, wanted: dict[int, list[int]]) -> None:
    for number, tokens in wanted.items():
        got = await session.ended(number)
        assert got.tokens == tokens
        assert got.ending is not None
        assert got.ending.reason == common_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
        assert not got.ending.HasField("keep_bytes")


async def error_of(session: SessionClient, number: int) -> common_pb2.Error:
    ending = (await session.ended(number)).ending
    assert ending is not None
    assert (ending.reason, ending.was_accepted) == (common_pb2.FINISH_REASON_FAILED, True)
    return ending.error


def states(mesh: SchedulerMesh) -> list[RequestState]:
    return [request.state for request in mesh.state.requests.values()]


@pytest.mark.composes("structured output", "seed", "dispatch-ahead")
async def test_constrained_and_free_requests_share_batches_and_each_keeps_to_its_own(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.02)
    session = await (await mesh.session()).ready()
    threes = multiples(3, 9)
    wanted = {1: await submit(session, 1), 2: await submit(session, 2, threes), 3: await submit(session, 3)}
    await session.submit(4, [4] * 3, params(seed=4))
    await all_complete(session, wanted)
    assert (await session.ended(4)).tokens == expected_output(RULES, [4] * 3, params(seed=4))
    assert [token % 7 for token in wanted[1]] == [0] * 12
    assert sorted(ask.constraint.regex for ask in worker.prepares) == ["3x9", "7x12"], "two who want the same wait for one compile"
    assert worker.overlaps > 0


async def test_while_a_constraint_is_compiled_its_requests_are_in_nobodys_way(mesh: SchedulerMesh):
    worker = await mesh.worker(slots=1)
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    wanted = {1: await submit(session, 1)}
    await worker.wait_prepares(1)
    await session.submit(2, [9], params())
    await session.ended(2)
    (request,) = mesh.state.requests.values()
    assert (request.state, request.wait_reason, request.residency) == (RequestState.CHECKING, WaitReason.CHECKING, None)
    assert session.received[1].accepted == 1
    assert await mesh.sample("num_requests_waiting_by_reason", reason="checking") == 1
    worker.compiling.set()
    await all_complete(session, wanted)
    assert await mesh.sample("constraint_prepares_total", outcome="compiled") == 1
    assert await mesh.sample("constraint_prepare_seconds_count") == 1


async def test_a_constraint_that_is_compiled_is_not_asked_for_again(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    for number in (1, 2, 3):
        await all_complete(session, {number: await submit(session, number)})
    assert len(worker.prepares) == 1
    assert await mesh.sample("constraints_kept") == 1


async def test_what_is_wrong_with_a_constraint_is_its_requests_ending(mesh: SchedulerMesh):
    worker = await mesh.worker(verdict=lambda constraint: INVALID)
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    await submit(session, 2, multiples(7, 12, param="guided_regex"))
    for number, param in ((1, "response_format.json_schema.schema"), (2, "guided_regex")):
        error = await error_of(session, number)
        assert (error.code, error.message, error.param) == (ErrorCode.INVALID_CONSTRAINT.spec.code, "no such schema", param)
    await submit(session, 3)
    assert (await error_of(session, 3)).code == ErrorCode.INVALID_CONSTRAINT.spec.code
    assert len(worker.prepares) == 1, "what was refused a moment ago is not compiled again"
    assert worker.batches == []
    await session.submit(4, [1], params())
    assert len((await session.ended(4)).tokens) == 20
    assert await mesh.sample("constraint_prepares_total", outcome="invalid") == 1


async def test_a_worker_that_is_busy_is_a_429_to_the_new_and_a_wait_to_who_resumes(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "RETRY_NS", 0)
    worker = await mesh.worker()
    worker.verdict = lambda constraint: BUSY if len(worker.prepares) < 3 else None
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    error = await error_of(session, 1)
    assert (error.code, error.retry_after_ms) == (ErrorCode.CONSTRAINT_BUSY.spec.code, 1000)
    want = await submit(session, 2, attempt=1)
    await all_complete(session, {2: want})
    assert await mesh.sample("constraint_prepares_total", outcome="busy") == 2


async def test_an_answer_that_never_comes_ends_the_wait_and_nothing_else(mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "PATIENCE_NS", 0)
    worker = await mesh.worker()
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    assert (await error_of(session, 1)).code == ErrorCode.CONSTRAINT_BUSY.spec.code
    await mesh.until(lambda: worker.forgotten == [ask.id for ask in worker.prepares])
    worker.compiling.set()
    await mesh.until(lambda: mesh.state.counters.stale_prepared == 1)
    await session.submit(2, [1], params())
    assert len((await session.ended(2)).tokens) == 20
    assert await mesh.sample("constraint_prepares_total", outcome="unanswered") == 1


@pytest.mark.refuses("structured output", reason="the workers' configuration has no backend")
async def test_without_a_backend_a_constraint_is_refused_and_names_its_parameter(mesh: SchedulerMesh):
    await mesh.worker(backend="")
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    ending = (await session.ended(1)).ending
    assert ending is not None
    assert (ending.was_accepted, ending.error.code) == (False, ErrorCode.UNSUPPORTED.spec.code)
    assert ending.error.param == "response_format.json_schema.schema"
    assert session.model is not None
    assert session.model.constraint_backend == ""


@pytest.mark.composes("structured output", "cancel", "deadline")
async def test_cancels_and_deadlines_end_requests_that_are_being_checked(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    await submit(session, 2, deadline_remaining_us=50_000)
    await session.cancel(1)
    for number, reason in ((1, common_pb2.FINISH_REASON_CANCELLED), (2, common_pb2.FINISH_REASON_DEADLINE)):
        ending = (await session.ended(number)).ending
        assert ending is not None
        assert ending.reason == reason
    worker.compiling.set()


@pytest.mark.composes("structured output", "n", "prefix caching", "chunked prefill")
async def test_choices_are_checked_once_and_share_their_prompt(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    prompt, wanted = [5] * 80, {}
    for number in (1, 2, 3):
        sampling = params(seed=number, max_tokens=40, choice_index=number - 1)
        await session.submit(number, prompt, sampling, constraint=SEVENS.to_proto(), parent_id=0 if number == 1 else 1)
        wanted[number] = expected_output(RULES, prompt, sampling, SEVENS)
    await mesh.until(lambda: len(mesh.state.requests) == 3)
    assert [request.wait_reason for request in mesh.state.requests.values()] == [WaitReason.CHECKING, *[WaitReason.PARENT_PROMPT] * 2]
    worker.compiling.set()
    await all_complete(session, wanted)
    assert len(worker.prepares) == 1
    assert mesh.state.counters.sibling_shared == 2 * 64


async def test_choices_of_a_refused_constraint_all_fail(mesh: SchedulerMesh):
    worker = await mesh.worker(verdict=lambda constraint: INVALID)
    session = await (await mesh.session()).ready()
    for number in (1, 2, 3):
        await submit(session, number, parent_id=0 if number == 1 else 1)
    for number in (1, 2, 3):
        assert (await error_of(session, number)).code == ErrorCode.INVALID_CONSTRAINT.spec.code
    assert len(worker.prepares) == 1


@pytest.mark.composes("structured output", "preemption", "prefix caching")
async def test_a_preempted_request_keeps_to_its_constraint(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker(blocks=8, max_model_len=128)
        session = await (await mesh.session()).ready()
        wanted = {number: await submit(session, number, multiples(3, 58), prompt=40) for number in (1, 2)}
        await all_complete(session, wanted)
        assert mesh.state.counters.preemptions > 0


@pytest.mark.composes("structured output", "worker loss")
async def test_a_worker_that_comes_back_compiles_again_before_its_requests_go_on(mesh: SchedulerMesh):
    worker = await mesh.worker(step_seconds=0.002)
    session = await (await mesh.session()).ready()
    wanted = {number: await submit(session, number) for number in (1, 2, 3)}
    await worker.wait_batches(4)
    await worker.stop()
    await mesh.until(lambda: not mesh.state.groups)
    assert set(states(mesh)) == {RequestState.CHECKING}
    assert {request.wait_reason for request in mesh.state.requests.values()} == {WaitReason.NO_WORKER}
    again = await mesh.worker()
    await all_complete(session, wanted)
    assert len(again.prepares) == 1


@pytest.mark.composes("structured output", "several workers", "worker loss")
async def test_a_request_goes_on_where_its_constraint_is_ready(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        first = await mesh.worker(0)
        first.gate.clear()
        session = await (await mesh.session()).ready()
        wanted = {number: await submit(session, number) for number in (1, 2)}
        await first.wait_batches(1)
        second = await mesh.worker(1)
        await second.wait_prepares(1)
        await first.stop()
        await all_complete(session, wanted)
        assert any(opened.constraint_id for batch in second.batches for opened in batch.opens)


@pytest.mark.composes("structured output", "several workers")
async def test_of_workers_that_disagree_the_one_that_can_runs_the_request(tmp_path: Path):
    async with SchedulerMesh(tmp_path, static_workers=2) as mesh:
        able = await mesh.worker(0)
        able.compiling.clear()
        unable = await mesh.worker(1, verdict=lambda constraint: INVALID)
        session = await (await mesh.session()).ready()
        await mesh.until(lambda: len(mesh.state.groups) == 2)
        wanted = {1: await submit(session, 1)}
        await unable.wait_prepares(1)
        await mesh.until(lambda: mesh.state.checking.checks.unanswered == 1)
        assert states(mesh) == [RequestState.CHECKING]
        able.compiling.set()
        await all_complete(session, wanted)
        assert not any(batch.opens for batch in unable.batches)


@pytest.mark.composes("structured output", "leases", "stop strings")
async def test_in_a_lease_a_row_ends_with_its_constraint_and_the_others_go_on(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_lease_steps=8) as mesh:
        worker = await mesh.worker(step_seconds=0.001)
        session = await (await mesh.session()).ready()
        sampling = params(seed=2, max_tokens=60, stop=("never",))
        await session.submit(2, [2] * 3, sampling)
        wanted = {1: await submit(session, 1)}
        await all_complete(session, wanted)
        assert (await session.ended(2)).tokens == expected_output(RULES, [2] * 3, sampling)
        assert any(batch.lease_steps > 1 for batch in worker.batches)


@pytest.mark.composes("structured output", "stop strings")
async def test_a_stop_string_ends_a_constrained_output_before_its_constraint_does(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    free = expected_output(RULES, [1], params(seed=9), SEVENS)
    stop = "".join(RULES.table.tokens[token].decode() for token in free[2:4])
    await session.submit(1, [1], params(seed=9, stop=(stop,), include_stop_in_output=True), constraint=SEVENS.to_proto())
    got = await session.ended(1)
    assert got.ending is not None
    assert (got.ending.reason, got.ending.stop_string) == (common_pb2.FINISH_REASON_STOP, stop)
    text = "".join(RULES.table.tokens[token].decode() for token in free)
    assert got.ending.keep_bytes == text.index(stop) + 2


@pytest.mark.composes("structured output", "session loss")
@pytest.mark.parametrize("has", [0, 5, 12], ids=["nothing", "a part", "all but the ending"])
async def test_a_resumed_request_goes_on_in_its_constraint(mesh: SchedulerMesh, has: int):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    whole = expected_output(RULES, [1] * 3, params(seed=1, max_tokens=60), SEVENS)
    await submit(session, 1, attempt=1, output_ids=pack_ids(whole[:has]))
    want = whole if has < 12 else [*whole, EOS]
    got = await session.ended(1)
    assert got.tokens == want
    assert got.ending is not None
    assert got.ending.reason == common_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
    assert got.ending.HasField("keep_bytes") == (has == 12), "an end of sequence is no text"


@pytest.mark.composes("structured output", "session loss")
async def test_a_lost_session_leaves_nothing_that_is_checked(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    await submit(session, 1)
    await worker.wait_prepares(1)
    await session.close()
    await mesh.until(lambda: not mesh.state.requests)
    assert len(mesh.state.checking) == 0
    worker.compiling.set()


@pytest.mark.composes("structured output", "priority")
async def test_who_was_checked_takes_the_place_that_its_priority_gives_it(tmp_path: Path):
    async with SchedulerMesh(tmp_path, scheduling_policy="priority") as mesh:
        worker = await mesh.worker(slots=1)
        worker.gate.clear()
        worker.compiling.clear()
        session = await (await mesh.session()).ready()
        await session.submit(1, [1], params(max_tokens=2), priority=0)
        await worker.wait_batches(1)
        await submit(session, 2, priority=-1)
        await session.submit(3, [3], params(max_tokens=2), priority=0)
        await worker.wait_prepares(1)
        worker.compiling.set()
        await mesh.until(lambda: len(mesh.state.queue) == 2)
        worker.gate.set()
        for number in (1, 2, 3):
            await session.ended(number)
        slots = [opened.request for batch in worker.batches for opened in batch.opens]
        assert [name.rpartition(":")[2] for name in slots] == ["1", "2", "3"]


async def test_a_trace_says_how_long_a_request_was_checked(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.compiling.clear()
    session = await (await mesh.session()).ready()
    parent = TraceParent.new()
    want = await submit(session, 1, trace=common_pb2.TraceContext(traceparent=str(parent)))
    await worker.wait_prepares(1)
    since = mesh.process.clock.monotonic_ns()
    await mesh.until(lambda: mesh.process.clock.monotonic_ns() - since > 20_000_000)
    worker.compiling.set()
    await all_complete(session, {1: want})
    await mesh.settled()
    mesh.process.tracer.shutdown()
    queue = next(span for span in mesh.spans.get_finished_spans() if span.name == "queue")
    attributes = dict(queue.attributes or {})
    assert attributes["tokenloom.wait_reason"] == "checking"
    assert int(attributes["tokenloom.wait_us.checking"]) >= 20_000  # type: ignore[call-overload]
