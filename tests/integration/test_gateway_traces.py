"""One trace per request: the gateway's spans touch each other, leave room for the scheduler's, and add up to the root."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.tracing import TraceParent
from tests.support.gateway_fakes import EOS, FAILED, FakeScheduler, FakeTokenizer, ids_of, silence
from tests.support.gateway_process import Gateway, running_gateway
from tokenloom.scheduler.v1 import scheduler_pb2

US = 1_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


async def traced(gateway: Gateway, *, wall: bool, fields: dict | None = None, headers: dict | None = None):
    """A request whose scheduler reports its timings on the same wall clock, or on one an hour ahead. Returns response and spans by name."""
    clock = gateway.mesh.clock
    body = {"prompt": "ab", "stream": True, **(fields or {})}
    task = asyncio.create_task(gateway.client.post("/v1/completions", json=body, headers=headers or {}))
    session, submit = await gateway.scheduler.submitted.get()
    received = clock.unix_ns()
    session.emit(submit.id, ids_of("one"))
    await asyncio.sleep(0.02)
    ended = clock.unix_ns()
    off = 0 if wall else 3_600_000_000_000
    spent = (ended - received) // US
    timings = scheduler_pb2.Timings(
        received_unix_ns=received + off, ended_unix_ns=ended + off, queue_us=spent // 4, prefill_us=spent // 4, decode_us=spent // 2
    )
    session.emit(submit.id, [EOS], ending=session.ending(submit.id, timings=timings, cached_tokens=1))
    response = await task
    await gateway.until_idle()
    await asyncio.to_thread(gateway.mesh.tracer.shutdown)
    spans: dict[str, list] = {}
    for span in gateway.spans.finished:
        spans.setdefault(span.name, []).append(span)
    return response, spans, submit, (received + off, ended + off)


@pytest.mark.parametrize("wall", [True, False])
async def test_the_stages_touch_and_add_up(gateway, wall):
    _, spans, _, (received, ended) = await traced(gateway, wall=wall)
    (root,), (tokenize,), (out, back), (stream,) = (
        spans["POST /v1/completions"],
        spans["tokenize"],
        spans["transport"],
        spans["stream"],
    )
    assert tokenize.start_time == root.start_time
    assert out.start_time == tokenize.end_time
    assert stream.start_time == back.end_time
    assert stream.end_time == root.end_time
    if wall:
        assert (out.end_time, back.start_time) == (received, ended), "the scheduler's queue span begins where our transport ends"
    chain = [tokenize, out, back, stream]
    assert all(first.end_time <= second.start_time for first, second in itertools.pairwise(chain))
    inside = ended - received
    total = sum(span.end_time - span.start_time for span in chain) + inside
    assert abs(total - (root.end_time - root.start_time)) <= max(0.02 * (root.end_time - root.start_time), 2_000_000)
    assert {span.parent.span_id for span in chain} == {root.context.span_id}
    assert {span.context.trace_id for span in [root, *chain]} == {root.context.trace_id}


async def test_the_scheduler_and_the_tokenizer_get_their_parents(gateway):
    _, spans, submit, _ = await traced(gateway, wall=True)
    root, tokenize = spans["POST /v1/completions"][0], spans["tokenize"][0]
    (attempt,) = spans["tokenloom.tokenizer.v1.TokenizerService/Encode"]
    assert TraceParent.parse(submit.trace.traceparent).span_id == root.context.span_id
    assert TraceParent.parse(gateway.tokenizer.traceparents[0]).span_id == attempt.context.span_id
    assert attempt.parent.span_id == tokenize.context.span_id
    assert (root.kind, tokenize.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT)


async def test_a_retry_at_another_tokenizer_is_seen_in_the_tree(tmp_path):
    busy, idle = FakeTokenizer(), FakeTokenizer()
    busy.failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "full")
    addresses = [await fake.start(f"unix:{tmp_path}/{name}.sock") for name, fake in (("busy", busy), ("idle", idle))]
    async with running_gateway(tmp_path, tokenizer_address=addresses) as gateway:
        while not busy.calls:
            assert (await gateway.complete("ab")).status_code == 200
        await gateway.until_idle()
        await asyncio.to_thread(gateway.mesh.tracer.shutdown)
        root = [span for span in gateway.spans.finished if span.name == "POST /v1/completions"][-1]
        spans = [span for span in gateway.spans.finished if span.context.trace_id == root.context.trace_id]
        (tokenize,) = [span for span in spans if span.name == "tokenize"]
        attempts = [span for span in spans if span.kind is SpanKind.CLIENT]
        assert {span.parent.span_id for span in attempts} == {tokenize.context.span_id}
        told = [(span.attributes["tokenloom.attempt"], span.attributes["rpc.response.status_code"]) for span in attempts]
        assert told == [(0, "RESOURCE_EXHAUSTED"), (1, "OK")]
        assert [span.attributes["server.address"] for span in attempts] == [f"{tmp_path}/busy.sock", f"{tmp_path}/idle.sock"]
        assert tokenize.start_time <= attempts[0].start_time <= attempts[0].end_time <= attempts[1].start_time
    for fake in (busy, idle):
        await fake.stop()


async def test_a_clients_trace_is_continued_and_told_back(gateway):
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    response, spans, submit, _ = await traced(gateway, wall=True, headers=headers)
    root = spans["POST /v1/completions"][0]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.parent.is_remote
    assert response.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert submit.trace.tracestate == "vendor=1"
    assert root.attributes["tokenloom.x_request_id"] == "mine"


async def test_an_unsampled_trace_is_passed_on_but_not_recorded(gateway):
    response, spans, submit, _ = await traced(gateway, wall=True, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"})
    assert spans == {}
    assert response.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert submit.trace.traceparent.endswith("-00")


@pytest.mark.parametrize("header", ["garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01", f"ff-{TRACE}-b7ad6b7169203331-01"])
async def test_an_invalid_traceparent_starts_a_trace_of_its_own(gateway, header):
    _, spans, _, _ = await traced(gateway, wall=True, headers={"traceparent": header})
    assert spans["POST /v1/completions"][0].parent is None


async def test_the_root_span_says_what_was_asked_and_what_came_of_it(gateway):
    fields = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.5}
    response, spans, submit, _ = await traced(gateway, wall=True, fields=fields)
    attributes = spans["POST /v1/completions"][0].attributes
    root = spans["POST /v1/completions"][0]
    (event,) = root.events
    assert (event.name, root.start_time < event.timestamp < root.end_time) == ("first_token", True)
    assert abs(attributes["gen_ai.response.time_to_first_chunk"] * 1e9 - (event.timestamp - root.start_time)) < 5_000_000
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.provider.name": "tokenloom",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.response.id": f"cmpl-{response.headers['x-request-id']}",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "gen_ai.usage.cache_read.input_tokens": 1,
        "tokenloom.request_id": f"{gateway.mesh.session.instance:x}:{submit.id}",
        "tokenloom.attempts": 1,
    }
    assert {name: attributes[name] for name in expected} == expected


async def test_a_failed_request_has_a_trace_too(tmp_path):
    tokenizer = FakeTokenizer()
    tokenizer.failure = TokenloomError(ErrorCode.INTERNAL, "broken")
    async with running_gateway(tmp_path, FakeScheduler(silence), tokenizer) as gateway:
        assert (await gateway.chat()).status_code == 500
        await asyncio.to_thread(gateway.mesh.tracer.shutdown)
        spans = {span.name: span for span in gateway.spans.finished}
        root, tokenize = spans["POST /v1/chat/completions"], spans["tokenize"]
        assert root.status.status_code is StatusCode.ERROR
        assert tokenize.status.status_code is StatusCode.ERROR
        assert root.attributes["error.type"] == "internal"
        assert root.attributes["http.response.status_code"] == 500


async def test_a_clients_mistake_is_no_error_of_the_server(gateway):
    await gateway.chat("hi", temperature=-1)
    await asyncio.to_thread(gateway.mesh.tracer.shutdown)
    root = next(span for span in gateway.spans.finished if span.name.startswith("POST"))
    assert {span.status.status_code for span in gateway.spans.finished} == {StatusCode.UNSET}
    assert root.attributes["error.type"] == "invalid_request"


async def test_the_time_that_a_lost_scheduler_cost_and_the_wait_for_the_next_are_a_stage_of_their_own(gateway):
    task = asyncio.create_task(gateway.complete("ab"))
    first, _ = await gateway.scheduler.submitted.get()
    first.close()
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    await task
    await gateway.until_idle()
    await asyncio.to_thread(gateway.mesh.tracer.shutdown)
    spans = {span.name: span for span in reversed(gateway.spans.finished)}
    tokenize, lost, out = spans["tokenize"], spans["lost"], spans["transport"]
    assert (tokenize.end_time, lost.end_time) == (lost.start_time, out.start_time)
    (event,) = lost.events
    assert (event.name, lost.start_time < event.timestamp < lost.end_time) == ("scheduler_lost", True)
    assert spans["POST /v1/completions"].attributes["tokenloom.attempts"] == 2


async def test_each_prompt_has_its_own_transport(gateway):
    task = asyncio.create_task(gateway.complete(["a", "b"]))
    for _ in range(2):
        session, submit = await gateway.scheduler.submitted.get()
        session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    await task
    await asyncio.to_thread(gateway.mesh.tracer.shutdown)
    choices = [span.attributes["tokenloom.choice"] for span in gateway.spans.finished if span.name == "transport"]
    assert sorted(choices) == [0, 0, 1, 1]


async def test_one_line_is_logged_for_a_finished_request_without_its_text(gateway, monkeypatch):
    lines = []
    monkeypatch.setattr("services.gateway.record._log.info", lambda event, **fields: lines.append({"event": event, **fields}))
    task = asyncio.create_task(gateway.chat("private words"))
    session, submit = await gateway.scheduler.submitted.get()
    session.emit(submit.id, [*ids_of("secret answer"), EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))
    await task
    await gateway.until_idle()
    (line,) = lines
    assert (line["event"], line["status"], line["finish"], line["completion_tokens"]) == ("request finished", 200, ["stop"], 14)
    assert line["ttft_ms"] <= line["total_ms"]
    assert not any(word in str(line) for word in ("private", "secret"))


async def test_a_failed_ending_is_logged_with_its_label(gateway, monkeypatch):
    lines = []
    monkeypatch.setattr("services.gateway.record._log.info", lambda event, **fields: lines.append(fields))
    task = asyncio.create_task(gateway.chat("x"))
    session, submit = await gateway.scheduler.submitted.get()
    error = TokenloomError(ErrorCode.NON_FINITE, "nan").to_proto()
    session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=error))
    await task
    await gateway.until_idle()
    assert (lines[0]["status"], lines[0]["error"], lines[0]["finish"]) == (500, "non_finite", ["non_finite"])
