"""Requests through a real scheduler over real gRPC: every token once, every ending once, nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.errors import ErrorCode
from libs.sampling import SamplingParams
from libs.telemetry.tracing import TraceParent
from services.scheduler.sessions import Outbox
from services.scheduler.workers import WorkerLink
from tests.support.core import RULES
from tests.support.model_worker import expected_output
from tests.support.scheduler_mesh import SchedulerMesh, params
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SchedulerMesh]:
    async with SchedulerMesh(tmp_path) as mesh:
        yield mesh


async def test_one_request_from_submit_to_ending(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    prompt, sampling = list(range(1, 20)), params(seed=5)
    await session.submit(1, prompt, sampling)
    got = await session.ended(1)
    assert (got.tokens, got.accepted) == (expected_output(RULES, prompt, sampling), 1)
    assert got.ending is not None
    assert (got.ending.reason, got.ending.prompt_tokens, got.ending.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 19, 20)
    assert got.ending.was_accepted
    assert got.ending.timings.steps == 20


async def test_an_idle_worker_has_its_batch_ahead_of_the_frame_that_acknowledges_the_request(
    mesh: SchedulerMesh, monkeypatch: pytest.MonkeyPatch
):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    order: list[str] = []
    send, take = WorkerLink.send, Outbox.take

    def sent(link: WorkerLink, batch: worker_pb2.StepBatch) -> None:
        order.append("batch")
        send(link, batch)

    def taken(outbox: Outbox, number: int, window: scheduler_pb2.Window) -> scheduler_pb2.SchedulerFrame:
        if outbox.accepted:
            order.append("acknowledgement")
        return take(outbox, number, window)

    monkeypatch.setattr(WorkerLink, "send", sent)
    monkeypatch.setattr(Outbox, "take", taken)
    await session.submit(1, [1, 2, 3], params())
    assert len((await session.ended(1)).tokens) == 20
    assert order.index("batch") < order.index("acknowledgement")


async def test_thirty_two_at_once_each_get_their_own_tokens(mesh: SchedulerMesh):
    await mesh.worker(blocks=24, slots=6)
    session = await (await mesh.session()).ready()
    wanted = {}
    for number in range(1, 33):
        prompt = [1] * (16 * (number % 3)) + [number % 39 + 1] * (number % 11 + 1)
        sampling = params(seed=number, max_tokens=5 + number % 17, ignore_eos=number % 2 == 0)
        wanted[number] = expected_output(RULES, prompt, sampling)
        await session.submit(number, prompt, sampling)
    for number, tokens in wanted.items():
        assert (await session.ended(number)).tokens == tokens
    assert mesh.state.counters.finished == 32
    assert mesh.state.counters.prefix_hits > 0


async def test_a_waiting_request_is_cancelled(mesh: SchedulerMesh):
    worker = await mesh.worker(slots=1)
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params())
    await session.submit(2, [2], params())
    await session.cancel(2)
    ending = (await session.ended(2)).ending
    assert ending is not None
    assert (ending.reason, ending.cancel_reason) == (common_pb2.FINISH_REASON_CANCELLED, common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED)
    assert ending.timings.prefill_us == ending.timings.decode_us == 0
    worker.gate.set()
    assert len((await session.ended(1)).tokens) == 20


@pytest.mark.composes("cancel")
async def test_a_running_request_is_cancelled_and_its_blocks_are_free_when_its_batch_is_over(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1] * 40, params())
    await worker.wait_batches(1)
    await session.cancel(1, common_pb2.CANCEL_REASON_SLOW_READER)
    ending = (await session.ended(1)).ending
    assert ending is not None
    assert ending.cancel_reason == common_pb2.CANCEL_REASON_SLOW_READER
    (group,) = mesh.state.groups.values()
    assert (group.ledger.in_use, group.ledger.draining) == (0, 3)
    assert await mesh.sample("cancel_to_free_seconds_count") == 0
    worker.gate.set()
    await mesh.settled()
    assert await mesh.sample("cancel_to_free_seconds_count") == 1


async def test_cancels_of_unknown_and_of_ended_requests_are_counted_and_ignored(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params(max_tokens=1))
    await session.ended(1)
    await session.cancel(1)
    await session.cancel(99)
    await mesh.until(lambda: mesh.state.counters.unknown_cancels == 2)
    assert session.received[1].ending is not None
    assert session.received[1].ending.reason == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.composes("deadline")
@pytest.mark.parametrize("worker_runs", [True, False], ids=["running", "waiting"])
async def test_a_deadline_ends_a_request_wherever_it_is(mesh: SchedulerMesh, worker_runs: bool):
    worker = await mesh.worker(slots=1)
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    number = 1
    if not worker_runs:
        await session.submit(1, [1], params(max_tokens=1))
        number = 2
    await session.submit(number, [2], params(), deadline_remaining_us=50_000)
    ending = (await session.ended(number)).ending
    assert ending is not None
    assert ending.reason == common_pb2.FINISH_REASON_DEADLINE
    assert 50_000 <= ending.timings.queue_us + ending.timings.prefill_us < 5_000_000


async def test_a_deadline_that_has_passed_at_submit_ends_without_a_token(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params(max_tokens=100), deadline_remaining_us=0)
    ending = (await session.ended(1)).ending
    assert ending is not None
    assert ending.reason == common_pb2.FINISH_REASON_DEADLINE


@pytest.mark.composes("stop strings", "seed")
async def test_a_stop_string_ends_at_its_token_and_says_how_much_to_keep(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    free = expected_output(RULES, [7, 8], params(seed=3))
    text = "".join(RULES.table.tokens[token].decode() if token else "" for token in free)
    stop = text[9:11]
    keep = text.index(stop)
    await session.submit(1, [7, 8], params(seed=3, stop=(stop, "never")))
    got = await session.ended(1)
    assert got.ending is not None
    assert (got.ending.reason, got.ending.stop_string, got.ending.keep_bytes) == (common_pb2.FINISH_REASON_STOP, stop, keep)
    assert got.tokens == expected_output(RULES, [7, 8], params(seed=3, stop=(stop,)))
    assert got.ending.completion_tokens == len(got.tokens)


@pytest.mark.composes("session loss", "seed")
async def test_a_resubmission_goes_on_exactly_where_the_client_is(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    prompt, sampling = [3] * 20, params(seed=11, max_tokens=30)
    want = expected_output(RULES, prompt, sampling)
    await session.submit(1, prompt, sampling, output_ids=b"".join(token.to_bytes(4, "little") for token in want[:13]), attempt=1)
    got = await session.ended(1)
    assert got.tokens == want
    assert got.ending is not None
    assert (got.ending.attempt, got.ending.completion_tokens, got.ending.prompt_tokens) == (1, 30, 20)


async def test_a_resubmission_whose_output_was_complete_ends_at_once(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    await session.submit(1, [3], params(max_tokens=2), output_ids=b"\x04\0\0\0\x05\0\0\0", attempt=1)
    got = await session.ended(1)
    assert got.ending is not None
    assert (got.ending.reason, got.ending.completion_tokens, got.accepted) == (common_pb2.FINISH_REASON_LENGTH, 2, 1)
    assert worker.batches == []


async def test_a_repeated_submit_of_a_live_request_changes_nothing(mesh: SchedulerMesh):
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    await session.submit(1, [3], params())
    await worker.wait_batches(1)
    await session.submit(1, [3], params())
    worker.gate.set()
    got = await session.ended(1)
    assert (got.accepted, len(got.tokens), mesh.state.counters.admitted) == (1, 20, 1)


async def test_bad_submits_are_refused_one_by_one_and_the_session_lives(mesh: SchedulerMesh):
    await mesh.worker()
    session = await (await mesh.session()).ready()
    bad: list[tuple[list[int], SamplingParams, dict[str, object], ErrorCode]] = [
        ([], params(), {}, ErrorCode.INVALID_REQUEST),
        ([1], params(max_tokens=0), {}, ErrorCode.INVALID_REQUEST),
        ([1], params(stop=("",)), {}, ErrorCode.INVALID_REQUEST),
        ([1], params(), {"output_ids": b"abc"}, ErrorCode.INVALID_REQUEST),
        ([1], params(), {"adapter": "lora"}, ErrorCode.UNSUPPORTED),
        ([1] * 128, params(), {}, ErrorCode.PROMPT_TOO_LONG),
    ]
    for number, (prompt, sampling, fields, code) in enumerate(bad, 1):
        await session.submit(number, prompt, sampling, **fields)
        ending = (await session.ended(number)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.was_accepted) == (code, False)
        assert session.received[number].accepted == 0
    await session.submit(50, [1], params(max_tokens=2))
    assert len((await session.ended(50)).tokens) == 2
    assert mesh.state.counters.admitted == 1


@pytest.mark.composes("bounded queue")
async def test_a_full_queue_is_a_refusal_with_a_time_to_come_back(tmp_path: Path):
    async with SchedulerMesh(tmp_path, max_queue=2) as mesh:
        worker = await mesh.worker()
        worker.gate.clear()
        session = await (await mesh.session()).ready()
        assert session.window.max_outstanding == 2
        for number in (1, 2, 3):
            await session.submit(number, [number], params(max_tokens=2))
        ending = (await session.ended(3)).ending
        assert ending is not None
        assert (ErrorCode.from_number(ending.error.code), ending.error.retry_after_ms) == (ErrorCode.QUEUE_FULL, 1000)
        assert await mesh.sample("request_rejected_total", reason="queue_full") == 1
        worker.gate.set()
        await session.ended(1)
        await session.ended(2)


async def test_a_traced_request_leaves_three_consecutive_spans_and_the_worker_knows_its_parents(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    parent = TraceParent.new()
    trace = common_pb2.TraceContext(traceparent=str(parent))
    await session.submit(1, [1] * 20, params(max_tokens=3), trace=trace)
    await session.ended(1)
    await mesh.stop()
    mesh.process.tracer.shutdown()
    queue, prefill, decode = mesh.spans.get_finished_spans()
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    opened = worker.batches[0].opens[0]
    told = TraceParent.parse(opened.trace.traceparent)
    assert told is not None
    assert prefill.context is not None
    assert decode.context is not None
    assert (told.span_id, opened.decode_span_id) == (prefill.context.span_id, decode.context.span_id)
    assert opened.request_span_id == parent.span_id
    assert told.trace_id == parent.trace_id


async def test_a_preempted_requests_trace_says_when_why_and_for_how_long(tmp_path: Path):
    async with SchedulerMesh(tmp_path) as mesh:
        await mesh.worker(max_model_len=128, blocks=8)
        session = await (await mesh.session()).ready()
        parents = {number: TraceParent.new() for number in (1, 2)}
        for number, parent in parents.items():  # each comes to 7 blocks of the 8
            await session.submit(number, [number] * 40, params(max_tokens=60), trace=common_pb2.TraceContext(traceparent=str(parent)))
        for number in parents:
            await session.ended(number)
        await mesh.settled()
        mesh.process.tracer.shutdown()
        spans = [span for span in mesh.spans.get_finished_spans() if span.context and span.context.trace_id == parents[2].trace_id]
        assert [span.name for span in spans] == ["queue", "prefill", "decode"]
        decode = spans[-1]
        events = [(event.name, dict(event.attributes or {})) for event in decode.events]
        names = [name for name, _ in events]
        assert (names.count("preempted"), names.count("resumed")) == (1, 1)
        assert dict(decode.attributes or {})["tokenloom.preemptions"] == 1
        waits = [attributes for name, attributes in events[names.index("preempted") : names.index("resumed")] if name == "waiting"]
        assert "no_blocks" in {wait["tokenloom.reason"] for wait in waits}
        at = {event.name: event.timestamp for event in decode.events}
        waited = sum(int(wait["tokenloom.wait_us"]) for wait in waits)  # type: ignore[call-overload]
        assert abs(waited - (at["resumed"] - at["preempted"]) // 1000) <= len(waits), "the waits add up to the time it did not run"


async def test_a_log_line_about_a_submit_leads_to_its_trace(mesh: SchedulerMesh, monkeypatch):
    lines: list[dict[str, str]] = []
    monkeypatch.setattr("services.scheduler.intake.log.warning", lambda event, **fields: lines.append(fields))
    worker = await mesh.worker()
    worker.gate.clear()
    session = await (await mesh.session()).ready()
    parent = TraceParent.new()
    for _ in range(2):
        await session.submit(1, [1], params(max_tokens=1), trace=common_pb2.TraceContext(traceparent=str(parent)))
    worker.gate.set()
    await session.ended(1)
    assert [(line["trace_id"], line["span_id"]) for line in lines] == [(f"{parent.trace_id:032x}", f"{parent.span_id:016x}")]


async def test_an_untraced_request_is_not_traced_by_the_worker(mesh: SchedulerMesh):
    worker = await mesh.worker()
    session = await (await mesh.session()).ready()
    await session.submit(1, [1], params(max_tokens=1), trace=common_pb2.TraceContext(traceparent=str(TraceParent.new(sampled=False))))
    await session.ended(1)
    assert not worker.batches[0].opens[0].HasField("trace")
