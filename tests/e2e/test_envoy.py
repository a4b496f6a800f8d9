"""The mesh as it is deployed, without containers: Envoy's real binary with the project's configuration between real processes.

What needs no model is in tests/integration/test_envoy.py.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from libs.telemetry.trace_store import StoredSpan
from libs.telemetry.trace_store_otlp import serve_traces
from tests.support.envoy import Envoy, running_envoy
from tests.support.fleet import Collected, Fleet
from tests.support.mesh import sse
from tools.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "model": "default", "temperature": 0}
ENDED = 'tokenloom:tokenizer_requests_total{kind="chat",outcome="ok"}'


@dataclass
class Deployed:
    """The fleet, Envoy, and what a collector received of all of them."""

    fleet: Fleet
    envoy: Envoy
    spans: Collected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[Deployed]:
    folder, spans, port = tmp_path_factory.mktemp("fleet"), Collected(), free_port()
    collector = serve_traces(spans, f"127.0.0.1:{port}")
    fleet = Fleet(folder, model_dir, port)
    fleet.start()
    try:
        async with running_envoy(folder, fleet.backends("gateway"), fleet.backends("tokenizer"), port, ports=fleet.ports) as envoy:
            await envoy.until_healthy("tokenizer", 2, 120)
            await envoy.until_healthy("gateway", 2, 120)
            yield Deployed(fleet, envoy, spans)
    finally:
        fleet.stop()
        collector.stop(0).wait()


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4, **fields})


async def test_a_chat_streams_chunk_by_chunk_through_envoy(deployed: Deployed) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 48, "ignore_eos": True}
    loop, arrivals = asyncio.get_running_loop(), []
    async with deployed.envoy.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for chunk in sse(response):
            if chunk["choices"]:
                arrivals.append(loop.time())
    # Whole answers come at once, whatever the machine's speed: of what is streamed most comes well apart from the first.
    assert len(arrivals) > 10
    spread = arrivals[-1] - arrivals[0]
    assert len({round(10 * (instant - arrivals[0]) / spread) for instant in arrivals}) > 5


async def test_openai_s_client_works_through_envoy(deployed: Deployed) -> None:
    async with openai.AsyncOpenAI(base_url=f"{deployed.envoy.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="default", messages=CHAT["messages"], temperature=0, max_tokens=16)  # type: ignore[arg-type]
        assert "Paris" in (answer.choices[0].message.content or "")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=CHAT["messages"])  # type: ignore[arg-type]


async def test_two_tokenizers_share_the_load(deployed: Deployed) -> None:
    def calls() -> list[float]:
        return [tokenizer.metrics()[ENDED] for tokenizer in deployed.fleet.replicas("tokenizer")]

    deadline = asyncio.get_running_loop().time() + 60
    async with deployed.envoy.client() as client:
        while True:
            await deployed.envoy.until_healthy("tokenizer", 2)
            before = calls()
            answers = await asyncio.gather(*(chat(client, max_tokens=1) for _ in range(24)))
            assert {answer.status_code for answer in answers} == {200}
            gained = [after - begun for begun, after in zip(before, calls(), strict=True)]
            assert sum(gained) == 24
            if min(gained) >= 4:
                return
            # On a machine so busy that one of them was taken for dead meanwhile, the next round tells.
            assert asyncio.get_running_loop().time() < deadline, (gained, deployed.envoy.metrics())


async def test_a_request_is_one_tree_of_spans_from_the_client_to_the_tokenizer(deployed: Deployed) -> None:
    trace_id, client_span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with deployed.envoy.client() as client:
        response = await chat(client)
        assert response.status_code == 200
        response = await client.post(
            "/v1/chat/completions", json={**CHAT, "max_tokens": 4}, headers={"traceparent": f"00-{trace_id}-{client_span}-01"}
        )
        assert response.status_code == 200
    spans = await collected(deployed.spans, trace_id)
    by_id = {span.span_id: span for span in spans}
    assert [span for span in spans if span.parent_id not in by_id] == [span for span in spans if span.parent_id == client_span]
    (root,) = [span for span in spans if span.parent_id == client_span]
    assert (root.service, root.kind) == ("tokenloom-envoy", "server")
    (last,) = [span for span in spans if span.service == "tokenloom-tokenizer"]
    path = [f"{span.service.removeprefix('tokenloom-')} {span.kind}" for span in ancestors(last, by_id)]
    assert [step for step in path if "internal" not in step] == [
        *("tokenizer server", "envoy client", "envoy server"),
        *("gateway client", "gateway server", "envoy client", "envoy server"),
    ]
    async with asyncio.timeout(30):  # the log is written once a second
        while {line["listener"] for line in deployed.envoy.access_log() if trace_id in line.get("traceparent", "")} != {
            "edge",
            "tokenizers",
        }:
            await asyncio.sleep(0.1)


def ancestors(span: StoredSpan, by_id: dict[str, StoredSpan]) -> list[StoredSpan]:
    path = [span]
    while path[-1].parent_id in by_id:
        path.append(by_id[path[-1].parent_id])
    return path


async def collected(spans: Collected, trace_id: str) -> list[StoredSpan]:
    """A trace once all five services have told of it, Envoy of both its hops."""
    everybody = {f"tokenloom-{name}" for name in ("gateway", "tokenizer", "scheduler", "worker", "envoy")}
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        found = spans.of(trace_id)
        hops = [span for span in found if span.service == "tokenloom-envoy"]
        if {span.service for span in found} == everybody and len(hops) == 4 and any(span.name.startswith("POST") for span in found):
            return found
        assert asyncio.get_running_loop().time() < deadline, "\n".join(f"{span.service} {span.name} {span.kind}" for span in found)
        await asyncio.sleep(0.05)


async def test_a_client_that_wants_no_trace_gets_none(deployed: Deployed) -> None:
    unwanted, wanted = "1" * 32, "2" * 32
    async with deployed.envoy.client() as client:
        for trace_id, flag in ((unwanted, "00"), (wanted, "01")):
            body = {**CHAT, "max_tokens": 4}
            headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-{flag}"}
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    await collected(deployed.spans, wanted)  # the later one is there: so would be the other
    assert not deployed.spans.of(unwanted)


async def test_a_killed_tokenizer_costs_no_request(deployed: Deployed) -> None:
    victim = deployed.fleet.replicas("tokenizer")[0]
    seen: list[int] = []

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(8):
            seen.append((await chat(client, max_tokens=1)).status_code)

    async with deployed.envoy.client() as client, asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(ask(client))
        while len(seen) < 8:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(victim.kill)
    assert seen == [200] * 64
    await deployed.envoy.until_healthy("tokenizer", 1)
    victim.start()
    await deployed.envoy.until_healthy("tokenizer", 2)


async def test_a_gateway_that_is_stopped_finishes_its_streams_and_costs_no_request(deployed: Deployed) -> None:
    victim = deployed.fleet.replicas("gateway")[0]
    async with deployed.envoy.client() as client:
        body = {**CHAT, "stream": True, "max_tokens": 100, "ignore_eos": True}
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(read(client, body, begun)) for _ in range(2)]  # least-request: mostly one on each
        for _ in streams:
            await begun.acquire()
        victim.running.send_signal(signal.SIGTERM)
        answers = [await chat(client, max_tokens=1)]
        while victim.running.poll() is None:
            answers.append(await chat(client, max_tokens=1))
        assert {answer.status_code for answer in answers} == {200}
        assert await asyncio.gather(*streams) == [100, 100]
        assert await victim.ended() == 0
    victim.start()
    await deployed.envoy.until_healthy("gateway", 2)


async def read(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Semaphore) -> int:
    """Reads a whole stream; its completion tokens. Releases `begun` at the first text."""
    tokens, text = 0, ""
    wanted = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=wanted) as response:
        assert response.status_code == 200
        async for chunk in sse(response):
            for choice in chunk["choices"]:
                if not text and choice["delta"].get("content"):
                    begun.release()
                text += choice["delta"].get("content") or ""
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return tokens


async def test_a_killed_gateway_costs_what_it_was_doing_and_nothing_else(deployed: Deployed) -> None:
    victim = deployed.fleet.replicas("gateway")[1]
    async with deployed.envoy.client() as client:
        running = [asyncio.create_task(chat(client, max_tokens=40, ignore_eos=True)) for _ in range(4)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(victim.kill)
        for answer in await asyncio.gather(*running):
            # What it had is lost, and not computed again behind the client's back.
            assert answer.status_code == 200 or answer.json()["error"]["code"] == "upstream_lost", answer.text
        await deployed.envoy.until_healthy("gateway", 1)
        assert {(await chat(client, max_tokens=1)).status_code for _ in range(8)} == {200}
    victim.start()
    await deployed.envoy.until_healthy("gateway", 2)


async def test_stopping_everything_as_compose_does_lets_a_stream_finish(deployed: Deployed) -> None:
    """The last test of this file: it ends what the others use."""
    body, begun = {**CHAT, "stream": True, "max_tokens": 150, "ignore_eos": True}, asyncio.Semaphore(0)
    async with deployed.envoy.client() as client:
        stream = asyncio.create_task(read(client, body, begun))
        await begun.acquire()
        deployed.envoy.term()  # what depends on others is stopped before them
        assert await asyncio.to_thread(deployed.envoy.process.wait, 60) == 0
        assert await stream == 150
    for name in ("gateway", "scheduler", "worker", "tokenizer"):
        for service in deployed.fleet.replicas(name):
            service.running.send_signal(signal.SIGTERM)
        for service in deployed.fleet.replicas(name):
            assert await service.ended() == 0, service.log.read_text()[-2000:]
    assert not [line for line in deployed.envoy.log.read_text().splitlines() if "ssert" in line]
    assert json.loads(deployed.fleet.replicas("gateway")[0].log.read_text().splitlines()[-1])["event"] == "the gateway has stopped"
