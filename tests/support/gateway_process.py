"""A whole gateway in the test's own loop, between fakes: real HTTP on a real port, real gRPC on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from libs.clock import SystemClock
from libs.telemetry.tracing import Tracer
from services.gateway.app import new_app
from services.gateway.config import GatewayConfig
from services.gateway.http_server import HttpServer, bind, new_server
from services.gateway.mesh import Mesh
from tests.support.gateway_fakes import FakeScheduler, FakeTokenizer


class Spans(SpanExporter):
    """Keeps what was exported."""

    def __init__(self) -> None:
        self.finished: list[ReadableSpan] = []

    def export(self, spans):
        self.finished.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        """Nothing to do."""


@dataclass
class Gateway:
    mesh: Mesh
    server: HttpServer
    url: str
    port: int
    client: httpx.AsyncClient
    scheduler: FakeScheduler
    tokenizer: FakeTokenizer
    spans: Spans

    async def chat(self, content: str = "hi", **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt="hi", **fields) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    async def metric(self, name: str, **labels: str) -> float:
        value = self.mesh.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value

    async def until_idle(self) -> None:
        """Waits until no request is open and nothing is outstanding."""
        await until(lambda: not self.mesh.open and not self.mesh.admission.sequences)
        assert self.mesh.admission.tokens == 0


async def until(condition, timeout: float = 5.0) -> None:
    """Lets the loop run until `condition()` holds; fails after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)


def events_of(text: str) -> list:
    """The events of an SSE body: JSON values, and "[DONE]" as it is."""
    found = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@contextlib.asynccontextmanager
async def running_gateway(
    folder: Path, scheduler: FakeScheduler | None = None, tokenizer: FakeTokenizer | None = None, *, wait_ready: bool = True, **config
) -> AsyncIterator[Gateway]:
    """A gateway whose scheduler and tokenizer are the given fakes."""
    scheduler, tokenizer, spans = scheduler or FakeScheduler(), tokenizer or FakeTokenizer(), Spans()
    scheduler_address = await scheduler.start(f"unix:{folder}/s.sock")
    addresses = config.pop("tokenizer_address", None) or [await tokenizer.start(f"unix:{folder}/t.sock")]
    settings = GatewayConfig(
        **{
            "port": 0,
            "scheduler_address": scheduler_address,
            "tokenizer_address": addresses,
            "served_model_name": ["tiny"],
            "drain_timeout": 1.0,
            "scheduler_patience": 0.0,
            **config,
        }
    )
    mesh = Mesh(settings, instance="gateway-test", clock=SystemClock(), tracer=Tracer("gateway", "test", exporters=[spans]))
    listener, url = bind(settings.host, settings.port, "")
    server = new_server(new_app(mesh))
    mesh.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        if wait_ready:
            await until(lambda: not mesh.obstacles())
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            yield Gateway(mesh, server, url, listener.getsockname()[1], client, scheduler, tokenizer, spans)
    finally:
        server.should_exit = True
        await mesh.drain()
        await serving
        await mesh.close()
        await scheduler.stop()
        await tokenizer.stop()
