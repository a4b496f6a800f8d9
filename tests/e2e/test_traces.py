"""One request, one trace: what a real collector receives from real processes, and what becomes of requests when it is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from libs.telemetry.tracing import TraceParent
from tests.support.mesh import Mesh, sse
from tests.support.otlp import OtlpReceiver, one
from tests.support.tiny_llama import make_tiny_llama

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
QUEUE = 64
ENCODE = "tokenloom.tokenizer.v1.TokenizerService/Encode"
# What every request that reached its end leaves, siblings by name.
WHOLE = f"""
    POST /v1/chat/completions (gateway server)
      decode (scheduler internal)
        worker.decode (worker internal)
      prefill (scheduler internal)
        worker.prefill (worker internal)
      queue (scheduler internal)
      stream (gateway internal)
      tokenize (gateway internal)
        {ENCODE} (gateway client)
          {ENCODE} (tokenizer server)
      transport (gateway internal)
      transport (gateway internal)
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver.running() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def mesh(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh of a tiny model that is told of the collector by OpenTelemetry's variables alone; its queues of spans are short."""
    model = make_tiny_llama(tmp_path_factory.mktemp("traces") / "tiny", max_position_embeddings=4096)
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1000",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        mesh = Mesh.start(tmp_path_factory.mktemp("mesh"), "--max-model-len=4096", "--kv-cache-memory-bytes=64M", model=str(model))
    yield mesh
    receiver.hang()
    began = time.monotonic()
    assert mesh.stop() == 0
    # Five processes end one after the other; a collector that hangs may cost each 2.5 s (by its own time limit it would be far more).
    assert time.monotonic() - began < 40


class Sent:
    """A request to be sent, and the headers by which its trace is found: it comes from a caller that traces."""

    def __init__(self, mesh: Mesh, **fields: Any) -> None:
        self.parent = TraceParent.new()
        self.headers = {"traceparent": str(self.parent), "x-request-id": f"id-{self.parent.span_id:x}"}
        plain = {"model": mesh.model, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8, "ignore_eos": True}
        self.body = {**plain, **fields}

    @property
    def trace_id(self) -> str:
        return f"{self.parent.trace_id:032x}"

    async def post(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=self.body, headers=self.headers)


async def test_a_request_is_one_trace_through_all_services(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh, seed=7, temperature=0.5)
    async with mesh.client() as client:
        answer = (await sent.post(client)).json()
    spans = receiver.await_tree(sent.trace_id, WHOLE)
    root = one(spans, "POST /v1/chat/completions")
    assert root.parent_id == f"{sent.parent.span_id:016x}", "the caller's span is the root's parent"
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": mesh.port,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenloom",
        "gen_ai.request.model": mesh.model,
        "gen_ai.request.stream": False,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": mesh.model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "tokenloom.x_request_id": sent.headers["x-request-id"],
        "tokenloom.attempts": 1,
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert {span.attributes["tokenloom.request_id"] for span in spans if span.service.endswith(("scheduler", "worker"))} == {
        root.attributes["tokenloom.request_id"]
    }
    assert not [span for span in spans if span.error]


def test_every_service_says_who_it_is(mesh: Mesh, receiver: OtlpReceiver) -> None:
    asyncio.run(_one_more(mesh, receiver))
    told = {service: receiver.resources[f"tokenloom-{service}"] for service in SERVICES}
    assert {resource["service.instance.id"] for resource in told.values()} == {f"{service}-0" for service in SERVICES}
    assert {resource["deployment.environment.name"] for resource in told.values()} == {"test"}
    assert len({resource["service.version"] for resource in told.values()}) == 1


async def _one_more(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh)
    async with mesh.client() as client:
        assert (await sent.post(client)).status_code == 200
    receiver.await_tree(sent.trace_id, WHOLE)


async def test_a_stream_has_the_same_tree_and_tells_when_its_first_token_came(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh, stream=True)
    async with (
        mesh.client() as client,
        client.stream("POST", "/v1/chat/completions", json=sent.body, headers=sent.headers) as response,
    ):
        assert [chunk async for chunk in sse(response)]
    spans = receiver.await_tree(sent.trace_id, WHOLE)
    root, prefill, decode = (one(spans, name) for name in ("POST /v1/chat/completions", "prefill", "decode"))
    (event,) = root.events
    assert (event.name, root.attributes["gen_ai.request.stream"]) == ("first_token", True)
    assert prefill.start_ns < event.unix_ns <= root.end_ns
    assert prefill.attributes["tokenloom.cached_tokens"] == root.attributes["gen_ai.usage.cache_read.input_tokens"]
    assert [event.name for event in prefill.events] == ["chunk"] * prefill.attributes["tokenloom.chunks"]
    assert (decode.attributes["tokenloom.output_tokens"], decode.attributes["tokenloom.finish_reason"]) == (8, "length")
    assert one(spans, "queue").attributes["tokenloom.wait_reason"] == "none"


async def test_each_choice_has_its_own_stages(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh, n=2, temperature=1.0)
    async with mesh.client() as client:
        assert len((await sent.post(client)).json()["choices"]) == 2
    expected = f"""
    POST /v1/chat/completions (gateway server)
      decode (scheduler internal)
        worker.decode (worker internal)
      decode (scheduler internal)
        worker.decode (worker internal)
      prefill (scheduler internal)
        worker.prefill (worker internal)
      prefill (scheduler internal)
        worker.prefill (worker internal)
      queue (scheduler internal)
      queue (scheduler internal)
      stream (gateway internal)
      tokenize (gateway internal)
        {ENCODE} (gateway client)
          {ENCODE} (tokenizer server)
      transport (gateway internal)
      transport (gateway internal)
      transport (gateway internal)
      transport (gateway internal)
    """
    spans = receiver.await_tree(sent.trace_id, expected)
    root = one(spans, "POST /v1/chat/completions")
    assert root.attributes["gen_ai.request.choice.count"] == 2
    decodes = [span.attributes["tokenloom.request_id"] for span in spans if span.name == "decode"]
    assert sorted(decodes) == sorted(root.attributes["tokenloom.request_id"])


async def test_a_clients_mistakes_end_where_they_are_found_and_are_no_failures(mesh: Mesh, receiver: OtlpReceiver) -> None:
    early, late = Sent(mesh, temperature=-1), Sent(mesh, messages=[{"role": "user", "content": "long " * 4096}])
    async with mesh.client() as client:
        assert [(await sent.post(client)).status_code for sent in (early, late)] == [400, 400]
    root = "POST /v1/chat/completions (gateway server)\n  tokenize (gateway internal)"
    call = f"\n    {ENCODE} (gateway client)\n      {ENCODE} (tokenizer server)"
    for sent, expected, label in ((early, root, "invalid_request"), (late, root + call, "prompt_too_long")):
        spans = receiver.await_tree(sent.trace_id, expected)
        attributes = one(spans, "POST /v1/chat/completions").attributes
        assert (attributes["http.response.status_code"], attributes["error.type"]) == (400, label)
        assert not [span for span in spans if span.error]
    (client_span,) = [span for span in spans if span.kind == "client"]
    assert client_span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"


async def test_a_client_that_leaves_is_seen_in_its_trace(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh, stream=True, max_tokens=3500)
    async with (
        mesh.client() as client,
        client.stream("POST", "/v1/chat/completions", json=sent.body, headers=sent.headers) as response,
    ):
        async for line in response.aiter_lines():
            if "content" in line:
                break
    spans = receiver.await_tree(sent.trace_id, WHOLE)
    last = one(spans, "decode").events[-1]
    assert (last.name, last.attributes["tokenloom.reason"]) == ("cancelled", "client_disconnected")
    root = one(spans, "POST /v1/chat/completions")
    assert (root.attributes["error.type"], root.error) == ("cancelled", None)
    assert root.attributes["gen_ai.usage.output_tokens"] < 3500


async def test_a_request_whose_scheduler_is_killed_stays_one_tree(mesh: Mesh, receiver: OtlpReceiver) -> None:
    sent = Sent(mesh, stream=True, max_tokens=1500)
    contents = 0
    async with (
        mesh.client() as client,
        client.stream("POST", "/v1/chat/completions", json=sent.body, headers=sent.headers) as response,
    ):
        async for line in response.aiter_lines():
            if "content" in line:
                contents += 1
                if contents == 5:
                    mesh.service("scheduler").kill()
    # What the first scheduler had begun is below the request itself: its own spans died with it.
    lost, begun = "      lost (gateway internal)\n", "      worker.decode (worker internal)\n      worker.prefill (worker internal)\n"
    prefill = "      prefill (scheduler internal)\n"
    spans = receiver.await_tree(sent.trace_id, WHOLE.replace(prefill, lost + prefill) + begun)
    root = one(spans, "POST /v1/chat/completions")
    assert (root.attributes["tokenloom.attempts"], root.error) == (2, None)


async def load(mesh: Mesh, seconds: float) -> int:
    """Requests from four clients at once, all of which must succeed; how many there were."""

    async def client_loop(client: httpx.AsyncClient) -> int:
        count = 0
        while time.monotonic() < ends:
            response = await Sent(mesh, max_tokens=2).post(client)
            assert response.status_code == 200, response.text
            count += 1
        return count

    ends = time.monotonic() + seconds
    async with mesh.client() as client:
        return sum(await asyncio.gather(*(client_loop(client) for _ in range(4))))


def resident(mesh: Mesh) -> int:
    """Bytes of memory of the four services."""
    return sum(mesh.service(name).memory_info().rss for name in SERVICES)


def dropped(mesh: Mesh, service: str) -> float:
    """Spans that the service could not deliver."""
    return sum(value for name, value in mesh.metrics(service).items() if name.startswith("tokenloom:trace_spans_dropped_total"))


async def test_a_collector_that_hangs_and_then_is_gone_costs_no_request_and_no_memory(mesh: Mesh, receiver: OtlpReceiver) -> None:
    await load(mesh, 1)
    before, told = resident(mesh), len(mesh.log.read_text())
    receiver.hang()
    try:
        # Until far more spans were made than the queue holds, however slow the machine is.
        while dropped(mesh, "gateway") < 2 * QUEUE:
            assert await load(mesh, 3) > 0
        receiver.go_away()
        assert await load(mesh, 3) > 0
    finally:
        receiver.answer()
        if receiver._server is None:
            receiver.come_back()
    assert resident(mesh) - before < 64 << 20
    begun = "spans are being lost; requests are not affected"
    assert begun in mesh.log.read_text()
    assert mesh.log.read_text()[told:].count(begun) <= len(SERVICES), "a line for each service when it begins, and no more"
    await _delivered_again(mesh, receiver)


async def _delivered_again(mesh: Mesh, receiver: OtlpReceiver) -> None:
    """A trace arrives whole, once the services have found the collector again."""
    deadline = time.monotonic() + 60
    while True:
        sent = Sent(mesh)
        async with mesh.client() as client:
            assert (await sent.post(client)).status_code == 200
        try:
            receiver.await_tree(sent.trace_id, WHOLE, seconds=3)
            return
        except AssertionError:
            assert time.monotonic() < deadline, "the collector is back and nothing arrives"
