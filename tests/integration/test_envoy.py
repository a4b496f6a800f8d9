"""The project's Envoy configuration in the real Envoy, between real gateways and tokenizers that do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.trace_store_otlp import serve_traces
from tests.support.envoy import Envoy, load, running_envoy
from tests.support.envoy_fleet import Fleet, attentive, fleet
from tests.support.fleet import Collected
from tests.support.gateway_fakes import EOS, ids_of, say, silence
from tests.support.gateway_process import Gateway, until
from tests.support.h2c import post
from tests.support.raw_http import RawClient
from tools.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory) -> AsyncIterator[tuple[Fleet, Collected]]:
    """A fleet for most of these tests, and what a collector received of its Envoy."""
    spans, port = Collected(), free_port()
    collector = serve_traces(spans, f"127.0.0.1:{port}")
    async with fleet(tmp_path_factory.mktemp("fleet"), collector=port) as found:
        yield found, spans
    collector.stop(0).wait()


@pytest_asyncio.fixture(loop_scope="module")
async def running(shared) -> Fleet:
    await shared[0].reset()
    return shared[0]


@pytest_asyncio.fixture(loop_scope="module")
async def silent(running) -> Fleet:
    """Its schedulers say only what the test says."""
    running.behave(silence)
    return running


@pytest.fixture
def spans(shared) -> Collected:
    return shared[1]


async def test_a_request_passes_both_ways_with_its_id(running):
    async with running.envoy.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "hello"
        assert response.headers["x-request-id"] == "mine-1"
        other = await client.post("/v1/chat/completions", json=CHAT)
    assert re.fullmatch(r"[0-9a-f-]{36}", other.headers["x-request-id"])
    assert "server" not in other.headers


async def begin(running: Fleet, text: str):
    """Answers the next submit with `text`; its session and submit."""
    _, session, submit = await running.submitted()
    session.emit(submit.id, ids_of(text))
    return session, submit


def finish(session, submit, text: str) -> None:
    session.emit(submit.id, [*ids_of(text), EOS])
    session.emit(submit.id, [], ending=session.ending(submit.id))


def refuse(gateway: Gateway, refusals: list[int]) -> None:
    """Makes a gateway refuse requests as one that drains, though its /ready does not say so yet."""

    def refused() -> TokenloomError:
        refusals.append(1)
        return TokenloomError(ErrorCode.DRAINING, "leaving")

    gateway.mesh.obstacle = refused


# ---------------------------------------------------------------------------------------------------------------- the edge


async def test_a_stream_arrives_as_it_is_written_over_http_1_and_http_2(silent):
    running = silent
    async with running.envoy.client() as client:
        first = asyncio.create_task(begin(running, "begun"))
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            session, submit = await first
            lines = response.aiter_lines()
            for letter in "abc":  # each is read before the next one is written
                session.emit(submit.id, ids_of(letter))
                while f'"text":"{letter}"' not in await anext(lines):
                    pass
            finish(session, submit, "")
        asked = asyncio.create_task(post(running.envoy.ports["edge"], "/v1/completions", b'{"prompt": "a", "stream": true}'))
        _, session, submit = await running.submitted()
        session.emit(submit.id, ids_of("x"))
        finish(session, submit, "y")
        answer = await asked
    assert answer.ok
    assert b"".join(answer.parts).endswith(b"data: [DONE]\n\n")


async def test_running_requests_are_spread_evenly(silent):
    running = silent
    async with running.envoy.client() as client:
        asked, taken = [], []
        for _ in range(12):
            asked.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})))
            taken.append(await running.submitted())
        numbers = [number for number, *_ in taken]
        # One in sixteen goes to the busier gateway: three to nine comes about once in a million runs.
        assert min(numbers.count(0), numbers.count(1)) > 3, numbers
        for _, session, submit in taken:
            finish(session, submit, "done")
        assert {response.status_code for response in await asyncio.gather(*asked)} == {200}


@contextlib.asynccontextmanager
async def busy_but_for_the_first(running: Fleet, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Requests run on the second gateway and none on the first, which is therefore the next one's choice."""
    asked, held = [], []
    while sum(number for number, *_ in held) < 2:
        asked.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})))
        held.append(await running.submitted())
    for number, session, submit in held:
        if number == 0:
            finish(session, submit, "done")
    await running.gateways[0].until_idle()
    running.behave(say("hello"))
    yield
    for number, session, submit in held:
        if number == 1:
            finish(session, submit, "done")
    assert {response.status_code for response in await asyncio.gather(*asked)} == {200}


async def test_a_second_try_leaves_the_gateway_that_refused_alone_though_it_has_the_least_to_do(silent):
    refusals: list[int] = []
    async with silent.envoy.client() as client, busy_but_for_the_first(silent, client):
        refuse(silent.gateways[0], refusals)
        answers = [await client.post("/v1/completions", json={"prompt": "a"}) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert refusals


async def test_a_gateway_that_died_idle_costs_no_request(tmp_path):
    patient = load()
    for cluster in patient["static_resources"]["clusters"]:
        cluster.pop("outlier_detection", None)
        for check in cluster.get("health_checks", ()):  # what notices it otherwise, and not before the requests of this test
            check["unhealthy_threshold"] = 1000
    async with fleet(tmp_path, document=patient) as running, running.envoy.client() as client:
        running.behave(silence)
        async with busy_but_for_the_first(running, client):
            for listener in running.gateways[0].server.servers:
                listener.close()
            for connection in list(running.gateways[0].server.server_state.connections):
                connection.transport.abort()
            await until(lambda: not running.gateways[0].server.server_state.connections)
            answers = [await client.post("/v1/completions", json={"prompt": "a"}) for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 5


async def test_what_a_leaving_gateway_refuses_is_tried_elsewhere_and_the_client_sees_nothing_of_it(running):
    refusals: list[int] = []
    refuse(running.gateways[0], refusals)
    async with running.envoy.client() as client:
        while len(refusals) < 3:
            response = await client.post("/v1/completions", json={"prompt": "a" * 400})
            assert response.status_code == 200, response.text
            assert "x-tokenloom-not-begun" not in response.headers


async def test_where_all_refuse_the_client_gets_what_the_gateway_said(running):
    refusals: list[int] = []
    for gateway in running.gateways:
        refuse(gateway, refusals)
    async with running.envoy.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "leaving")
    assert response.headers["retry-after"]
    assert "x-tokenloom-not-begun" not in response.headers
    assert len(refusals) == 3  # the first try and two more


async def test_where_none_is_ready_the_gateway_s_reason_reaches_the_client(running):
    for gateway in running.gateways:
        gateway.scheduler.set_window(max_outstanding=1, ready=False, not_ready_reason="the model is loading")
    await running.envoy.until_healthy("gateway", 0)
    async with running.envoy.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        ready = await client.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert "the model is loading" in response.json()["error"]["message"]
    assert ready.status_code == 503


async def test_a_request_whose_gateway_is_lost_is_not_computed_a_second_time(silent):
    running = silent
    async with running.envoy.client() as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "lost-1"}))
        number, *_ = await running.submitted()
        for connection in list(running.gateways[number].server.server_state.connections):
            connection.transport.abort()
        response = await asked
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_lost")
        assert response.headers["x-request-id"] == "lost-1"
        assert all(gateway.scheduler.submitted.empty() for gateway in running.gateways)


async def test_a_gateway_that_leaves_is_left_out_before_it_refuses(running):
    async with running.envoy.client() as client:
        running.gateways[0].mesh.leaving = True
        for _ in range(10):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await running.envoy.until_healthy("gateway", 1)
        served = running.gateways[0].scheduler.submitted.qsize()
        for _ in range(10):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert running.gateways[0].scheduler.submitted.qsize() == served


async def test_what_clients_or_the_mesh_do_wrong_ejects_no_gateway(running):
    def failing(code: ErrorCode):
        return say("x", reason=5, eos=False, error={"code": code.spec.code, "message": "no"})

    running.behave(failing(ErrorCode.INTERNAL))
    async with running.envoy.client() as client:
        failed = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(20)]
        wrong = [await client.post("/v1/chat/completions", json={}) for _ in range(20)]
        seen = running.envoy.metrics()
    assert {response.status_code for response in failed} == {500}
    assert {response.status_code for response in wrong} == {400}
    assert seen['envoy_cluster_outlier_detection_ejections_active{envoy_cluster_name="gateway"}'] == 0
    assert seen['envoy_cluster_membership_healthy{envoy_cluster_name="gateway"}'] == 2


async def test_what_envoy_answers_itself_has_openai_s_shape(running):
    async with running.envoy.client() as client:
        long = await client.post("/v1/chat/completions", json=CHAT, headers={"x-long": "x" * 40_000})
        hidden = await client.get("/metrics", headers={"x-request-id": "mine-2"})
    assert (long.status_code, long.json()["error"]["code"]) == (431, "headers_too_large")
    assert hidden.json() == {
        "error": {"message": "This path does not exist", "type": "invalid_request_error", "param": None, "code": "not_found"}
    }
    assert (hidden.status_code, hidden.headers["x-request-id"]) == (404, "mine-2")
    async with RawClient(running.envoy.ports["edge"]) as raw:
        await raw.send(b"this is not HTTP\r\n\r\n")
        answer = await raw.read_to_end()
    assert b"400 Bad Request" in answer


async def test_without_any_gateway_the_client_is_told_so_and_when_to_come_back(tmp_path):
    async with running_envoy(tmp_path, [free_port()], [free_port()]) as envoy, envoy.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert response.json() == {
        "error": {"message": "No server can take requests now", "type": "service_unavailable_error", "param": None, "code": "unavailable"}
    }
    assert response.headers["retry-after"] == "1"


async def test_the_gateway_s_own_refusals_pass_unchanged(running):
    running.configure(max_body_bytes=200_000)
    async with running.envoy.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "a" * 3_000_000})
        direct = await running.gateways[0].client.post("/v1/completions", json={"prompt": "a" * 3_000_000})
    assert response.status_code == direct.status_code == 413
    assert response.json() == direct.json()


async def test_connections_beyond_the_limit_are_closed_and_the_mesh_s_own_are_not_counted(tmp_path):
    document = load()
    document["layered_runtime"]["layers"][0]["static_layer"]["envoy.resource_limits.listener.edge.connection_limit"] = 2
    async with running_envoy(tmp_path, [free_port()], [free_port()], document=document) as envoy, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            held = await stack.enter_async_context(RawClient(envoy.ports["edge"]))
            await held.send(b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n")
            assert b"404" in await held.read_until(b"not_found")
        async with RawClient(envoy.ports["edge"]) as refused:
            assert await refused.read_to_end() == b""
        overflows = {name: value for name, value in envoy.metrics().items() if "downstream_cx_overflow" in name}
        assert sum(overflows.values()) == 1, overflows
        async with grpc.aio.insecure_channel(envoy.tokenizers) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)


# ----------------------------------------------------------------------------------------------------------------- traces


async def test_whatever_a_request_is_called_its_trace_goes_through_both_hops(running, spans):
    names = ["", "x", "urn:a/b=c"]
    async with running.envoy.client() as client:
        for number, name in enumerate(names, 1):
            headers = {"traceparent": f"00-{number:032x}-b7ad6b7169203331-01", **({"x-request-id": name} if name else {})}
            response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert response.headers["x-request-id"] == name or not name
    passed = [call for fake in running.tokenizers for call in fake.traceparents]
    for number in range(1, len(names) + 1):
        trace_id = f"{number:032x}"
        await until(lambda trace_id=trace_id: len(spans.of(trace_id)) == 4, 30)
        edge, gateway, inner, tokenizer = sorted(spans.of(trace_id), key=lambda span: span.start_ns)
        assert [(span.name, span.kind) for span in (edge, inner)] == [("edge", "server"), ("tokenizers", "server")]
        assert edge.parent_id == "b7ad6b7169203331"
        assert gateway.parent_id == edge.span_id
        assert tokenizer.parent_id == inner.span_id
        assert f"00-{trace_id}-{tokenizer.span_id}-01" in passed


async def test_a_client_that_wants_no_trace_gets_none_and_one_that_says_nothing_gets_one(running, spans):
    unwanted = "f" * 32
    async with running.envoy.client() as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"00-{unwanted}-b7ad6b7169203331-00"})
        response = await client.post("/v1/chat/completions", json=CHAT)
    trace_id = response.headers["traceparent"].split("-")[1]
    await until(lambda: len(spans.of(trace_id)) == 4, 30)
    passed = [call for fake in running.tokenizers for call in fake.traceparents]
    assert not spans.of(unwanted)
    assert sorted((call[3:35], call[-2:]) for call in passed) == sorted([(unwanted, "00"), (trace_id, "01")])


async def test_a_collector_that_does_not_answer_costs_nothing(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        async with fleet(tmp_path, collector=deaf.getsockname()[1]) as running, running.envoy.client() as client:
            for _ in range(30):
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


# ------------------------------------------------------------------------------------------------------------ time limits


def impatient() -> dict:
    """The configuration with the waits that a test cannot wait for made short."""
    document = attentive()
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager |= {"stream_idle_timeout": "1s", "request_headers_timeout": "0.3s", "request_timeout": "0.5s"}
    return document


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(tmp_path_factory) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("hasty"), document=impatient()) as found:
        yield found


async def test_comments_carry_a_silent_stream_past_the_idle_timeout(hasty):
    running = hasty
    running.behave(silence)
    running.configure(sse_keep_alive=0.1)
    async with running.envoy.client() as client:
        asked = client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        async with asked as response:
            _, session, submit = await running.submitted()
            lines, comments = response.aiter_lines(), 0
            while comments < 25:  # two and a half idle timeouts
                comments += await anext(lines) == ": keep-alive"
            finish(session, submit, "alive")
            rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"content":"alive"' in "".join(rest)


async def test_without_comments_the_idle_timeout_ends_it(hasty):
    running = hasty
    running.behave(silence)
    running.configure(sse_keep_alive=0.0)
    async with running.envoy.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        for gateway in running.gateways:
            await gateway.until_idle()  # it has noticed that its client left


async def test_headers_and_bodies_that_come_by_the_drop_are_cut_off(hasty):
    running = hasty
    async with asyncio.timeout(30):
        async with RawClient(running.envoy.ports["edge"]) as raw:
            await raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nX-Slow")
            headers = await raw.read_to_end()
        async with RawClient(running.envoy.ports["edge"]) as raw:
            await raw.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )
            body = await raw.read_to_end()
        for gateway in running.gateways:
            await until(lambda gateway=gateway: not gateway.mesh.open)
    for answer in (headers, body):
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b'"code":"request_timeout"' in answer


# -------------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.TOKENIZER_BUSY])
async def test_a_tokenizer_that_fails_or_is_full_costs_no_request(running, code):
    running.tokenizers[0].failure = TokenloomError(code, "not here")
    async with running.envoy.client() as client:
        while len(running.tokenizers[0].calls) < 5:
            response = await client.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 200, response.text


async def test_where_all_tokenizers_are_full_the_client_is_told_to_come_back(running):
    for tokenizer in running.tokenizers:
        tokenizer.failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "256 prompts wait already", retry_after_ms=7000)
    async with running.envoy.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["message"] == "256 prompts wait already"


async def test_what_a_tokenizer_refuses_keeps_its_details_and_is_asked_once(running):
    async with running.envoy.client() as client:
        response = await client.post("/v1/completions", json={"prompt": ""})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "empty_prompt")
    assert response.json()["error"]["param"] == "prompt"
    assert sum(len(tokenizer.calls) for tokenizer in running.tokenizers) == 1


async def test_calls_go_to_the_idle_tokenizer(running):
    running.tokenizers[0].gate.clear()
    async with running.envoy.client() as client:
        held = []
        while not running.tokenizers[0].calls:
            held.append(asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)))
            await asyncio.sleep(0.02)
        before = len(running.tokenizers[1].calls)
        for _ in range(10):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (len(running.tokenizers[0].calls), len(running.tokenizers[1].calls) - before) == (1, 10)
        running.tokenizers[0].gate.set()
        assert {response.status_code for response in await asyncio.gather(*held)} == {200}


async def test_a_caller_s_deadline_reaches_the_tokenizer(running):
    for tokenizer in running.tokenizers:
        tokenizer.gate.clear()
    async with running.envoy.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "timeout": 0.3})
    assert response.status_code == 504
    await until(lambda: sum(tokenizer.cancelled for tokenizer in running.tokenizers) == 1)


async def test_a_drained_tokenizer_gets_no_more_calls(running):
    await running.tokenizers[0].server.set_ready(False)
    await running.envoy.until_healthy("tokenizer", 1)
    before = len(running.tokenizers[0].calls)
    async with running.envoy.client() as client:
        for _ in range(10):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert len(running.tokenizers[0].calls) == before


# ------------------------------------------------------------------------------------------------------- Envoy's own end


async def test_a_drain_of_envoy_lets_streams_end_and_takes_no_new_connections(tmp_path):
    async with fleet(tmp_path) as running, running.envoy.client() as client:
        running.behave(silence)
        first = asyncio.create_task(begin(running, "begun, "))
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            session, submit = await first
            lines = response.aiter_lines()
            running.envoy.term()
            await until_refused(running.envoy)
            assert running.envoy.process.poll() is None
            finish(session, submit, "finished")
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"text":"finished"' in "".join(rest)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(running.envoy.process.wait) == 0


async def until_refused(envoy: Envoy) -> None:
    """Waits until nobody listens at the edge any more. Until then whoever connects is served."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", envoy.ports["edge"])
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.05)


async def test_a_request_that_does_not_end_holds_envoy_for_its_timeout_alone(tmp_path):
    async with fleet(tmp_path, ENVOY_DRAIN_DELAY="0", ENVOY_DRAIN_TIMEOUT="1") as running:
        running.behave(silence)
        envoy = running.envoy
        async with RawClient(envoy.ports["edge"]) as raw:
            await raw.post("/v1/completions", {"prompt": "a"})
            await running.submitted()
            envoy.term()
            async with asyncio.timeout(20):
                assert await asyncio.to_thread(envoy.process.wait) == 0
        assert "the time to drain is over, running requests: 1" in envoy.log.read_text()
