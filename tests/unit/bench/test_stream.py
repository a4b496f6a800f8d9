"""One request against a scripted server: times, usage, and every kind of failure."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.http import Target
from bench.sse import EventReader
from bench.stream import RequestRecord, stream_request
from tests.unit.bench.scripted import DONE, STREAM_HEAD, event, serving, text, usage


async def ask(server, timeout=10.0):
    record = RequestRecord(due=time.perf_counter())
    await stream_request(server.target, "/v1/chat/completions", {"x-test": "1"}, b"{}", record, timeout)
    return record


@given(
    st.lists(st.binary(max_size=8).filter(lambda data: not set(data) & set(b"\r\n")), max_size=6),
    st.data(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_are_the_same_however_their_bytes_are_cut(payloads, data, newline):
    stream = b"".join(b": comment" + newline + b"data: " + payload + newline + newline for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, found = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == payloads


def test_data_over_several_lines_is_one_event_and_other_fields_are_passed_over():
    assert list(EventReader().feed(b"event: x\ndata: a\ndata:b\nid: 3\n\n\nretry: 1\n\n")) == [b"a\nb"]


async def test_times_are_those_of_the_chunks_and_neither_role_nor_usage_is_a_token():
    sent: list[float] = []

    async def play(connection):
        await connection.raw(STREAM_HEAD)
        await connection.chunk(event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}))
        for word in ("a", "b", "c"):
            await asyncio.sleep(0.03)  # the gap that is to be measured
            sent.append(time.perf_counter())
            await connection.chunk(text(word))
        await connection.chunk(text("", "length") + usage(7, 3, cached=4) + DONE)
        await connection.raw(b"0\r\n\r\n")

    async with serving(play) as server:
        record = await ask(server)
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 4)
    assert len(record.chunk_times) == 3
    for measured, true in zip(record.chunk_times, sent, strict=True):
        assert 0 <= measured - true < 0.025
    assert record.ttft == record.chunk_times[0] - record.due >= 0.03
    assert all(gap > 0.005 for gap in record.gaps)
    assert "x-test: 1" in server.requests[0].head


async def test_a_body_that_only_ends_with_its_connection_is_whole():
    async def play(connection):
        await connection.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + text("a", "stop") + usage(1, 1) + DONE)

    async with serving(play) as server:
        record = await ask(server)
    assert (record.failure, record.output_tokens) == (None, 1)


async def hold(connection):
    """Sends one token, then nothing more until the client goes."""
    await connection.raw(STREAM_HEAD)
    await connection.chunk(text("a"))
    await connection.writer.wait_closed()


@pytest.mark.parametrize(
    ("play", "kind", "detail"),
    [
        (lambda c: c.answer(503, b'{"error": {"message": "no worker", "code": "no_worker"}}'), "http_503", "no worker"),
        (lambda c: c.answer(404, b"<html>nothing here"), "http_404", "<html>nothing here"),
        (lambda c: c.stream(text("a"), event({"error": {"message": "lost", "code": "session_lost"}}), DONE), "error_session_lost", "lost"),
        (lambda c: c.stream(event({"error": "bad"})), "error_unknown", "bad"),
        (lambda c: c.stream(text("a")), "truncated", "without"),
        (lambda c: c.stream(usage(3, 0), DONE), "no_text", "no chunk"),
        (lambda c: c.stream(b"data: {broken\n\n"), "malformed", "broken"),
        (lambda c: c.stream(b"data: [1]\n\n"), "malformed", "[1]"),
        (lambda c: c.stream(event({"usage": {"prompt_tokens": 1}})), "malformed", "completion_tokens"),
        (lambda c: c.raw(b"SMTP ready\r\n\r\n"), "malformed", ""),
        (lambda c: c.raw(STREAM_HEAD + b"5\r\nda"), "disconnected", "closed"),
        (lambda c: c.raw(b""), "disconnected", "closed"),
        (hold, "timeout", "0.2 s"),
    ],
)
async def test_each_failure_has_its_kind_and_says_why(play, kind, detail):
    async with serving(play) as server:
        record = await ask(server, timeout=0.2 if kind == "timeout" else 10.0)
    assert record.failure == kind
    assert detail in record.detail
    assert record.ended >= record.sent >= record.due


async def test_a_port_where_nobody_listens_is_a_failed_connect():
    async with serving(hold) as server:
        pass
    assert (await ask(server)).failure == "connect"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:81", Target("h", 81, tls=False)),
        ("http://h:81/v1/", Target("h", 81, tls=False)),
        ("https://h/api/v1", Target("h", 443, tls=True, prefix="/api")),
        ("http://[::1]:9", Target("::1", 9, tls=False)),
    ],
)
def test_a_url_may_or_may_not_end_in_v1(url, target):
    assert Target.parse(url) == target


def test_what_is_no_url_of_a_server_is_refused():
    assert Target.parse("http://[::1]:9").authority == "[::1]:9"
    for url in ("127.0.0.1:8000", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(ValueError):
            Target.parse(url)
