"""A whole mesh as real processes, started by `tokenloom serve` on a port of its own and ended by SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from libs.blocks import BLOCK_SIZE
from tools.ports import free_port

READY_SECONDS = 120.0
# For tests that kill services: how long requests outlive them must not depend on how fast a busy machine starts them again.
PATIENT = ("--resume-timeout=120", "--worker-grace=120")
# A KV block of the default model, SmolLM2-135M: 30 layers of 3 key and 3 value heads, 64 wide, in float32.
BLOCK_BYTES = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4


@dataclass
class Mesh:
    """A running mesh. `log` is what its processes wrote; `ready_seconds` how long the start took."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    run_base: Path
    ready_seconds: float = 0.0
    args: Sequence[str] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, *args: str, model: str = "") -> Mesh:
        """Starts and waits for /ready. Fails the test with the log's end when it does not come up."""
        port, log = free_port(), folder / "mesh.log"
        # A short base: the path of a Unix socket holds 107 bytes, and pytest's folders are deep.
        run_base = Path(f"/tmp/tokenloom-test-{os.getpid()}-{port}")
        command = [sys.executable, "-m", "cli.main", "serve", *([model] if model else []), f"--port={port}", "--log-format=json", *args]
        environment = {**os.environ, "TOKENLOOM_RUN_DIR": str(run_base)}
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        mesh = cls(process, port, log, run_base, args=args)
        try:
            wait_ready(mesh.url, process, log)
            mesh.ready_seconds = time.monotonic() - started
            mesh._wait_banner()
        except BaseException:
            mesh.stop()
            raise
        return mesh

    def _wait_banner(self) -> None:
        """Waits until the supervisor knows that the mesh is ready too: from then on it starts again what ends."""
        deadline = time.monotonic() + READY_SECONDS
        while "Ctrl-C" not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.02)

    @property
    def url(self) -> str:
        """Base of its HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        """The first served name."""
        return str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def client(self) -> httpx.AsyncClient:
        """An HTTP client without proxies or surprising limits."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(180.0), limits=limits, trust_env=False)

    def service(self, name: str) -> psutil.Process:
        """The process of a service ("worker")."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if f"services.{name}" in child.cmdline():
                return child
        raise AssertionError(f"no process of services.{name}")

    def metrics(self, service: str) -> dict[str, float]:
        """The samples of a service's Prometheus endpoint; labelled ones as name{label="value"}."""
        return scrape(self.metrics_url(service))

    def metrics_url(self, service: str) -> str:
        """Where a service's metrics are."""
        if service == "gateway":
            return f"{self.url}/metrics"
        found = re.search(rf"(http://\S+/metrics)\s+\({service}\)", self.log.read_text())
        assert found, f"the banner names no metrics endpoint of the {service}"
        return found[1]

    def socket(self, service: str) -> Path:
        """The Unix socket of a service."""
        return self.run_base / str(self.port) / f"{service}.sock"

    @contextlib.asynccontextmanager
    async def second_gateway(self, scheduler_address: str, *args: str) -> AsyncIterator[str]:
        """One more gateway process, which reaches the scheduler where it is told; yields its URL once it is ready. `args`: its flags."""
        port, log = free_port(), self.log.with_name("gateway-1.log")
        addresses = (f"--scheduler-address={scheduler_address}", f"--tokenizer-address=unix:{self.socket('tokenizer')}")
        names = (f"--port={port}", f"--served-model-name={self.model}", "--instance=gateway-1", "--log-format=json")
        command = [sys.executable, "-P", "-m", "services.gateway", *addresses, *names, *args]
        process = await asyncio.to_thread(_spawn, command, log)
        url = f"http://127.0.0.1:{port}"
        try:
            await asyncio.to_thread(wait_ready, url, process, log)
            yield url
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0
        finally:
            process.kill()
            process.wait()

    async def settle(self) -> dict[str, float]:
        """The scheduler's metrics once nothing is live and no block is held or draining; fails after 15 s."""
        deadline = time.monotonic() + 15
        while True:
            seen = self.metrics("scheduler")
            busy = (
                seen["tokenloom:num_requests_live"]
                + seen['tokenloom:kv_blocks{state="held"}']
                + seen['tokenloom:kv_blocks{state="draining"}']
            )
            if not busy:
                return seen
            assert time.monotonic() < deadline, f"not idle: {seen}"
            await asyncio.sleep(0.05)

    def stop(self) -> int:
        """Ctrl-C; returns the exit code. Every process that it started must be gone."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            child.kill()
        shutil.rmtree(self.run_base, ignore_errors=True)
        assert not alive, f"processes outlived the mesh: {alive}"
        return code


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for /ready; fails with the end of `log` when the process ends or does not get ready."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"{url} did not get ready:\n{log.read_text()[-6000:]}")


def scrape(url: str) -> dict[str, float]:
    """The samples of a Prometheus endpoint; labelled ones as name{label="value"}, without the model's name."""
    samples = {}
    for family in text_string_to_metric_families(httpx.get(url, timeout=10, trust_env=False).text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()) if key != "model_name")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


async def sse(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream; fails unless it ends with [DONE]."""
    done = False
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            assert not done, "something came after [DONE]"
            if line == "data: [DONE]":
                done = True
            else:
                yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"
