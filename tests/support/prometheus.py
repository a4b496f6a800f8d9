"""The real Prometheus with the project's own configuration: other addresses and a shorter interval, everything else as it is deployed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.binaries import need
from tools.ports import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
CONFIG = FOLDER / "prometheus.yml"
# Seconds. A scrape that a busy machine answers too late is made up for by the next.
INTERVAL = 2
PATIENCE = 60.0


def load() -> dict[str, Any]:
    """The configuration as it is deployed."""
    document: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return document


def moved(document: dict[str, Any], ports: Mapping[str, int]) -> dict[str, Any]:
    """The configuration on this machine: each job's one target is at its port of `ports` (a KeyError for a job that has none)."""
    interval = {"scrape_interval": f"{INTERVAL}s", "scrape_timeout": f"{INTERVAL}s", "evaluation_interval": f"{INTERVAL}s"}
    jobs = [
        {key: value for key, value in job.items() if not key.endswith("_sd_configs")}
        | {"static_configs": [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]}
        for job in document["scrape_configs"]
    ]
    rules = [str(FOLDER / pattern) for pattern in document["rule_files"]]
    return document | {"global": interval, "scrape_configs": jobs, "rule_files": rules}


@dataclass(slots=True)
class Prometheus:
    """A running Prometheus and its HTTP API."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    client: httpx.AsyncClient

    async def get(self, path: str, **params: str) -> Any:
        """What a GET of the API returns as `data`. Fails on an error, which for a query says what is wrong with it."""
        response = await self.client.get(f"/api/v1/{path}", params=params)
        answer = response.json()
        assert answer["status"] == "success", f"{path} {params}: {answer.get('error')}"
        return answer["data"]

    async def values(self, query: str) -> list[float]:
        """The finite samples that an expression has now."""
        data = await self.get("query", query=query)
        found = [data["result"][1]] if data["resultType"] == "scalar" else [series["value"][1] for series in data["result"]]
        return [value for text in found if math.isfinite(value := float(text))]

    async def until(self, query: str, good: Callable[[list[float]], bool] = bool) -> list[float]:
        """The samples of an expression once they are `good` (there is one); fails after a minute."""
        found: list[float] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while not good(found := await self.values(query)):
                    await asyncio.sleep(0.1)
                return found
        raise AssertionError(f"{query} has {found} after {PATIENCE:g} s")


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path, ports: Mapping[str, int]) -> AsyncIterator[Prometheus]:
    """Prometheus that scrapes each job's target at its port, exemplars kept, rules evaluated."""
    binary = need("prometheus", install="apt-get install prometheus")
    port, config, log = free_port(), folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(moved(load(), {**ports, "prometheus": port})))
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    process = await asyncio.to_thread(_spawn, command, log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            prometheus = Prometheus(process, port, log, client)
            await _until_ready(prometheus)
            yield prometheus
    finally:
        process.kill()
        process.wait()


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


async def _until_ready(prometheus: Prometheus) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await prometheus.client.get("/-/ready")).status_code == 200:
                    return
            assert prometheus.process.poll() is None, prometheus.log.read_text()[-4000:]
            await asyncio.sleep(0.05)
