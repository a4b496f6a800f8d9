"""Each service is started with the command and environment of what deploys it (Kubernetes' rendered manifest; compose and its image), and
must come up: its own probes answer, and a chat goes through all four. What a manifest says and the code does not take stops here.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.rpc import LIVE, connect
from tests.support.deployments import SERVICES, Start, compose_start, kubernetes_start, stage
from tests.support.redis_server import RedisServer
from tools.k8s_check.manifests import Cluster, Container
from tools.k8s_check.rendering import ROOT, Variant, render
from tools.ports import free_port

pytestmark = pytest.mark.e2e

READY_SECONDS = 120.0
POD = {"metadata.name": "{name}-0", "metadata.namespace": "tokenloom", "status.podIP": "127.0.0.1"}
SHARED_PORTS = {"TOKENLOOM_METRICS_PORT"}


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to a running service: gRPC health by a name, or HTTP by a path."""

    kind: str
    port: int
    asks: str

    async def answered(self) -> bool:
        """Whether the answer is the good one now."""
        try:
            if self.kind == "http":
                async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
                    return (await client.get(f"http://127.0.0.1:{self.port}{self.asks}")).status_code == 200
            async with connect(f"127.0.0.1:{self.port}") as channel:
                request = health_pb2.HealthCheckRequest(service=self.asks)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
                return answer.status == health_pb2.HealthCheckResponse.SERVING
        except (httpx.TransportError, grpc.aio.AioRpcError):
            return False


@dataclass
class Deployment:
    """What starts the services, and how each is asked; ports are still the containers'."""

    starts: dict[str, Start]
    probes: dict[str, list[Probe]]
    waits: list[Start] = field(default_factory=list)


def kubernetes() -> Deployment:
    """The minimal overlay, with the components that change what services are told."""
    cluster = Cluster.parse(render(Variant("minimal", ("tracing", "api-keys"))))
    containers = [container for name in SERVICES for container in cluster.workload(name).containers]
    return Deployment(
        {c.workload.name: kubernetes_start(c, cluster, POD) for c in containers if not c.init},
        {c.workload.name: [_probe(c, kind) for kind in c.probes] for c in containers if not c.init},
        [kubernetes_start(c, cluster, POD) for c in containers if c.init],
    )


def _probe(container: Container, kind: str) -> Probe:
    probe = container.probes[kind]
    if "httpGet" in probe:
        return Probe("http", container.ports[probe["httpGet"]["port"]], probe["httpGet"]["path"])
    return Probe("grpc", probe["grpc"]["port"], probe["grpc"].get("service", ""))


def compose() -> Deployment:
    """docker-compose.yml and the images' own defaults; the health check's arguments say what is asked."""
    probes = {}
    for name in SERVICES:
        _, _, _, _, kind, port, *asks = stage(name).healthcheck
        probes[name] = [Probe(kind, int(port), asks[0] if asks else "")]
    return Deployment({name: compose_start(name) for name in SERVICES}, probes)


class Machine:
    """This machine in the place of a cluster's network: the one table of what cannot be here as it is there."""

    def __init__(self, model: Path, redis: RedisServer) -> None:
        ports = {"gateway:8000": free_port(), "tokenizer:7001": free_port(), "scheduler:50052": free_port(), "worker:50051": free_port()}
        self.ports = {int(address.partition(":")[2]): port for address, port in ports.items()}
        self.table = {address: f"127.0.0.1:{port}" for address, port in ports.items()}
        self.table |= {f"0.0.0.0:{port}": f"127.0.0.1:{here}" for port, here in self.ports.items()}
        self.table |= {f"127.0.0.1:{port}": f"127.0.0.1:{here}" for port, here in self.ports.items()}
        self.table |= {
            # Envoy's part is tests/e2e/test_envoy.py: gateways ask the tokenizer itself.
            "envoy:7000": self.table["tokenizer:7001"],
            "redis:6379": f"127.0.0.1:{redis.port}",
            # Nobody listens there, as in a mesh without a collector.
            "otel-collector:4317": f"127.0.0.1:{free_port()}",
            "/models/served": str(model),
            "8000": str(self.ports[8000]),
        }

    def start(self, start: Start, log: Path) -> subprocess.Popen[bytes]:
        """The process that a container would be, with no variable of the mesh but the container's."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLOOM_", "OTEL_"))}
        with log.open("ab") as output:
            command = [sys.executable if word == "python" else word for word in start.command]
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=own | self.environment(start))

    def environment(self, start: Start) -> dict[str, str]:
        """Its variables: addresses and paths from the table, a metrics port of its own, the kernels where this machine keeps them."""
        changed = {name: self._here(value) for name, value in start.env.items() if name != "TOKENLOOM_CACHE"}
        return changed | {name: str(free_port()) for name in SHARED_PORTS & set(changed)}

    def _here(self, value: str) -> str:
        for there, here in self.table.items():
            scheme, separator, rest = value.rpartition("//")
            address, slash, path = rest.partition("/") if separator else (value, "", "")
            if address == there:
                return f"{scheme}{separator}{here}{slash}{path}"
        return value

    def probe(self, probe: Probe) -> Probe:
        """The same question at the port that it is asked at here."""
        return Probe(probe.kind, self.ports[probe.port], probe.asks)


@pytest.fixture(scope="module")
def redis(tmp_path_factory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def running(process: subprocess.Popen[bytes]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_of(log: Path) -> str:
    return log.read_text()[-4000:]


async def until_answered(probe: Probe, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while not await probe.answered():
            assert process.poll() is None, f"{probe}: ended with {process.returncode}:\n{end_of(log)}"
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("deployment", [kubernetes, compose], ids=["kubernetes", "compose"])
async def test_services_come_up_as_they_are_deployed_and_a_chat_goes_through_them(deployment, tmp_path, tiny_llama_dir, redis):
    deployed, machine = deployment(), Machine(tiny_llama_dir, redis)
    for wait in deployed.waits:
        process = machine.start(wait, tmp_path / "wait.log")
        async with running(process):
            assert await asyncio.to_thread(process.wait, 30) == 0
    async with AsyncExitStack() as stack:
        processes = {}
        # All at once, as Kubernetes does: whoever needs another waits for it.
        for name, start in deployed.starts.items():
            processes[name] = machine.start(start, tmp_path / f"{name}.log")
            await stack.enter_async_context(running(processes[name]))
        for name, process in processes.items():
            for probe in deployed.probes[name]:
                await until_answered(machine.probe(probe), process, tmp_path / f"{name}.log")
        await chat(machine.ports[8000], deployed.starts["gateway"].env)
        assert all(process.poll() is None for process in processes.values())
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(SERVICES, 0)


async def chat(port: int, env: dict[str, str]) -> None:
    """One answer from the model under its deployed name; with keys, only for who has one."""
    body = {"model": env["TOKENLOOM_SERVED_MODEL_NAME"], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {env['TOKENLOOM_API_KEY'].split(',')[1]}"} if "TOKENLOOM_API_KEY" in env else {}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        if headers:
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 401


def test_the_probes_are_those_of_the_manifests_and_of_the_images():
    both = {name: (kubernetes().probes[name], compose().probes[name]) for name in SERVICES}
    assert all(ours[0] in theirs for theirs, ours in both.values())  # what compose waits for, Kubernetes asks too
    assert {probe.asks for name in ("tokenizer", "scheduler", "worker") for probe in both[name][0]} == {"", LIVE}
    assert (ROOT / "deploy/healthcheck.py").exists()
