"""Envoy in front of real gateways in the test's own loop, whose schedulers and tokenizers do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.envoy import LISTENERS, Envoy, load, running_envoy
from tests.support.gateway_fakes import FakeScheduler, FakeSession, FakeTokenizer, say
from tests.support.gateway_process import Gateway, running_gateway
from tokenloom.scheduler.v1 import scheduler_pb2
from tools.ports import free_port


@dataclass
class Fleet:
    """Envoy in front of two gateways, each with a scheduler of its own, and of two tokenizers."""

    envoy: Envoy
    gateways: list[Gateway]
    tokenizers: list[FakeTokenizer]
    configs: list[Any] = field(default_factory=list)

    def configure(self, **changes: Any) -> None:
        """Changes settings of the gateways for the requests that follow."""
        for gateway in self.gateways:
            gateway.mesh.config = gateway.mesh.config.model_copy(update=changes)

    def behave(self, behaviour) -> None:
        """What both schedulers do with submits from now on."""
        for gateway in self.gateways:
            gateway.scheduler.behaviour = behaviour

    async def submitted(self) -> tuple[int, FakeSession, scheduler_pb2.Submit]:
        """The next submit, whichever gateway it came through: the gateway's number, session and submit."""
        waits = [asyncio.create_task(gateway.scheduler.submitted.get()) for gateway in self.gateways]
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        for other in others:
            other.cancel()
        (first,) = done
        return waits.index(first), *first.result()

    async def reset(self) -> None:
        """As it was at first: everybody there, healthy and idle."""
        for tokenizer in self.tokenizers:
            tokenizer.failure, tokenizer.cancelled = None, 0
            tokenizer.gate.set()
            tokenizer.calls.clear()
            tokenizer.traceparents.clear()
            await tokenizer.server.set_ready(True)
        for gateway, config in zip(self.gateways, self.configs, strict=True):
            gateway.mesh.config, gateway.mesh.leaving = config, False
            gateway.mesh.__dict__.pop("obstacle", None)
            gateway.scheduler.set_window(max_outstanding=64, max_outstanding_tokens=1_000_000, ready=True)
            await gateway.until_idle()
            gateway.scheduler.submitted, gateway.scheduler.cancels = asyncio.Queue(), asyncio.Queue()
        self.behave(say("hello"))
        await self.envoy.until_healthy("tokenizer", len(self.tokenizers))
        await self.envoy.until_healthy("gateway", len(self.gateways))


def attentive() -> dict:
    """The configuration, with health asked ten times as often: most of this file's time would be waiting for it."""
    document = load()
    for cluster in document["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", ()):
            check |= {"interval": "0.1s", "no_traffic_interval": "0.1s"}
    return document


@contextlib.asynccontextmanager
async def fleet(folder: Path, *, document: dict[str, Any] | None = None, collector: int = 0, **environment: str) -> AsyncIterator[Fleet]:
    """A fleet. `environment` is Envoy's."""
    ports = {name: free_port() for name in (*LISTENERS, "admin")}
    tokenizers = [FakeTokenizer() for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for tokenizer in tokenizers:
            addresses.append(await tokenizer.start("127.0.0.1:0"))
            stack.push_async_callback(tokenizer.stop)
            await tokenizer.server.set_ready(True)
        gateways = []
        for index in range(2):
            (folder / str(index)).mkdir()
            through = [f"127.0.0.1:{ports['tokenizers']}"]
            gateway = running_gateway(
                folder / str(index),
                FakeScheduler(),
                tokenizer_address=through,
                wait_ready=False,
            )
            gateways.append(await stack.enter_async_context(gateway))
        behind = [int(address.rpartition(":")[2]) for address in addresses]
        envoy = await stack.enter_async_context(
            running_envoy(
                folder,
                [gateway.port for gateway in gateways],
                behind,
                collector,
                document=document or attentive(),
                ports=ports,
                **environment,
            )
        )
        await envoy.until_healthy("tokenizer", 2)
        await envoy.until_healthy("gateway", 2)
        yield Fleet(envoy, gateways, tokenizers, [gateway.mesh.config for gateway in gateways])
