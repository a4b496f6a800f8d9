"""Several tokenizer replicas behind one client: balanced, retried, left alone while they fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from libs.clock import SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.packing import unpack_ids
from libs.telemetry.tracing import TraceParent, Tracer
from services.gateway.metrics import GatewayMetrics
from services.gateway.tokenizer_client import TokenizerClient
from tests.support.gateway_fakes import FakeTokenizer, ids_of
from tests.support.gateway_process import until
from tokenloom.tokenizer.v1 import tokenizer_pb2

REQUEST = tokenizer_pb2.EncodeRequest(text="ab")


@contextlib.asynccontextmanager
async def replicas(tmp_path, count: int = 2, *, expected: str = "", patience: float = 0.0, exporters: Sequence[SpanExporter] = ()):
    """Running replicas and a client of them."""
    fakes = [FakeTokenizer() for _ in range(count)]
    addresses = [await fake.start(f"unix:{tmp_path}/{index}.sock") for index, fake in enumerate(fakes)]
    client = TokenizerClient(
        addresses,
        SystemClock(),
        GatewayMetrics("m"),
        lambda: expected,
        tracer=Tracer("gateway", "g", exporters=exporters),
        patience=patience,
    )
    try:
        yield fakes, client
    finally:
        await client.close()
        for fake in fakes:
            await fake.stop()


async def encode(client: TokenizerClient, timeout: float | None = 5) -> list[int]:
    return unpack_ids((await client.encode(REQUEST, timeout=timeout, trace=None)).token_ids)


async def test_idle_replicas_take_turns(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        for _ in range(10):
            assert await encode(client) == ids_of("ab")
        assert [len(fake.calls) for fake in fakes] == [5, 5]


async def test_the_least_busy_replica_is_asked(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        fakes[0].gate.clear()
        held = [asyncio.create_task(encode(client))]
        while not fakes[0].calls:
            await asyncio.sleep(0)
            if held[-1].done():
                held.append(asyncio.create_task(encode(client)))
        before = len(fakes[1].calls)
        for _ in range(6):
            await encode(client)
        assert (len(fakes[0].calls), len(fakes[1].calls) - before) == (1, 6)
        fakes[0].gate.set()
        await asyncio.gather(*held)


async def test_a_dead_replica_costs_no_request(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        await fakes[0].stop()
        for _ in range(10):
            assert await encode(client) == ids_of("ab")
        assert len(fakes[1].calls) == 10


async def test_a_replica_that_returns_is_used_again(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        await fakes[0].stop()
        await encode(client)
        await encode(client)
        again = fakes[0] = FakeTokenizer()
        await again.start(f"unix:{tmp_path}/0.sock")
        async with asyncio.timeout(10):
            while not again.calls:
                await encode(client)


async def test_a_failing_replica_is_left_alone_for_a_while(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        fakes[0].failure = TokenloomError(ErrorCode.UNAVAILABLE, "restarting")
        for _ in range(8):
            await encode(client)
        assert len(fakes[0].calls) == 1


async def test_a_full_replica_is_passed_over_but_not_left_alone(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        fakes[0].failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "full")
        for _ in range(8):
            await encode(client)
        assert len(fakes[0].calls) == 4
        assert len(fakes[1].calls) == 8


async def test_all_full_is_busy_and_all_dead_is_unavailable(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        for fake in fakes:
            fake.failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "full")
        with pytest.raises(TokenloomError) as caught:
            await encode(client)
        assert caught.value.code is ErrorCode.TOKENIZER_BUSY
        assert caught.value.retry_after_ms
        for fake in fakes:
            await fake.stop()
        with pytest.raises(TokenloomError) as caught:
            await encode(client)
        assert caught.value.code is ErrorCode.TOKENIZER_UNAVAILABLE
        assert "unix:" not in caught.value.message


async def test_the_restart_of_the_only_replica_is_a_pause_and_not_an_error(tmp_path):
    async with replicas(tmp_path, 1, patience=30) as (fakes, client):
        await encode(client)
        await fakes[0].stop()
        waiting = asyncio.create_task(encode(client, timeout=None))
        await until(lambda: not client.reachable)
        assert not waiting.done()
        again = fakes[0] = FakeTokenizer()
        await again.start(f"unix:{tmp_path}/0.sock")
        assert await waiting == ids_of("ab")


async def test_patience_ends_with_the_request_s_own_time(tmp_path):
    async with replicas(tmp_path, 1, patience=30) as (fakes, client):
        await fakes[0].stop()
        with pytest.raises(TokenloomError) as caught:
            await asyncio.wait_for(encode(client, timeout=0.3), 10)
        assert caught.value.code in (ErrorCode.TOKENIZER_UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)


async def test_it_is_reachable_as_long_as_one_replica_is_and_again_when_one_returns(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        await fakes[0].stop()
        for _ in range(4):
            await encode(client)
        assert client.reachable
        await fakes[1].stop()
        await until(lambda: not client.reachable)
        again = fakes[1] = FakeTokenizer()
        await again.start(f"unix:{tmp_path}/1.sock")
        await until(lambda: client.reachable)


async def test_a_balancer_that_is_connected_but_has_nobody_behind_it_is_not_reachable(tmp_path):
    async with replicas(tmp_path, 1) as (fakes, client):
        loading = asyncio.create_task(client.load_table())
        await until(lambda: client.table is not None)
        fakes[0].failure = TokenloomError(ErrorCode.TOKENIZER_UNAVAILABLE, "no healthy upstream")
        with pytest.raises(TokenloomError):
            await encode(client)
        assert client.reachable  # a moment's failure is none
        await until(lambda: not client.reachable, 10)
        fakes[0].failure = None
        await until(lambda: client.reachable, 10)  # without any request
        loading.cancel()


async def test_one_address_never_locks_itself_out(tmp_path):
    async with replicas(tmp_path, 1) as (fakes, client):
        fakes[0].failure = TokenloomError(ErrorCode.TOKENIZER_UNAVAILABLE, "that one is gone")
        for _ in range(6):
            with pytest.raises(TokenloomError):
                await encode(client)
        fakes[0].failure = None
        assert await encode(client) == ids_of("ab")


async def test_what_a_tokenizer_refuses_is_not_tried_elsewhere(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        for fake in fakes:
            fake.failure = TokenloomError(ErrorCode.TEMPLATE_ERROR, "no such role", param="messages[0]")
        with pytest.raises(TokenloomError) as caught:
            await encode(client)
        assert (caught.value.code, caught.value.message, caught.value.param) == (ErrorCode.TEMPLATE_ERROR, "no such role", "messages[0]")
        assert sum(len(fake.calls) for fake in fakes) == 1


async def test_a_call_that_takes_too_long_is_a_deadline(tmp_path):
    async with replicas(tmp_path, 1) as (fakes, client):
        fakes[0].gate.clear()
        with pytest.raises(TokenloomError) as caught:
            await encode(client, timeout=0.05)
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
        fakes[0].gate.set()


async def test_a_replica_of_another_tokenizer_is_not_believed(tmp_path):
    async with replicas(tmp_path) as (fakes, client):
        client.table = fakes[0].table
        fakes[1].table = FakeTokenizer("0" * 64).table
        for _ in range(6):
            response = await client.encode(REQUEST, timeout=5, trace=None)
            assert response.tokenizer_fingerprint == fakes[0].table.fingerprint
        assert len(fakes[1].calls) == 1


async def test_the_text_table_is_fetched_as_soon_as_somebody_has_it(tmp_path):
    fake = FakeTokenizer()
    client = TokenizerClient([f"unix:{tmp_path}/late.sock"], SystemClock(), GatewayMetrics("m"), lambda: "", tracer=Tracer("gateway", "g"))
    loading = asyncio.create_task(client.load_table())
    try:
        await asyncio.sleep(0.05)
        assert client.table is None
        await fake.start(f"unix:{tmp_path}/late.sock")
        await until(lambda: client.table is not None)
        assert client.table == fake.table
    finally:
        loading.cancel()
        await client.close()
        await fake.stop()


async def test_the_trace_context_travels_as_metadata(tmp_path):
    async with replicas(tmp_path, 1) as (fakes, client):
        await client.encode(REQUEST, timeout=5, trace=TraceParent(7, 8))
        told = TraceParent.parse(fakes[0].traceparents[0])
        assert told is not None
        assert (told.trace_id, told.span_id == 8) == (7, False), "the attempt's own span is the tokenizer's parent"
        await encode(client)
        assert fakes[0].traceparents[1] == ""


async def test_each_attempt_is_a_span_that_names_where_it_went_and_what_came_of_it(tmp_path):
    spans = InMemorySpanExporter()
    async with replicas(tmp_path, exporters=[spans]) as (fakes, client):
        fakes[0].failure = fakes[1].failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "full")
        with pytest.raises(TokenloomError, match="full"):
            await client.encode(REQUEST, timeout=5, trace=TraceParent(7, 8))
        await fakes[0].stop()
        fakes[1].failure = None
        while len(fakes[1].calls) < 2:  # until the turn begins with the dead one, or it has been asked alone
            await client.encode(REQUEST, timeout=5, trace=TraceParent(9, 8))
        await asyncio.to_thread(client._tracer.shutdown)
    busy = [span for span in spans.get_finished_spans() if span.context.trace_id == 7]
    assert [span.name for span in busy] == ["tokenloom.tokenizer.v1.TokenizerService/Encode"] * 2
    assert {span.kind for span in busy} == {SpanKind.CLIENT}
    assert {span.parent.span_id for span in busy} == {8}
    assert [span.attributes["tokenloom.attempt"] for span in busy] == [0, 1]
    assert {span.attributes["server.address"] for span in busy} == {f"{tmp_path}/0.sock", f"{tmp_path}/1.sock"}
    assert {span.attributes["rpc.response.status_code"] for span in busy} == {"RESOURCE_EXHAUSTED"}
    assert {span.status.status_code for span in busy} == {StatusCode.UNSET}
    rest = [span for span in spans.get_finished_spans() if span.context.trace_id == 9]
    for span in rest:
        down = span.attributes["server.address"].endswith("0.sock")
        assert span.attributes["rpc.response.status_code"] == ("UNAVAILABLE" if down else "OK")
        assert span.status.status_code is (StatusCode.ERROR if down else StatusCode.UNSET)
