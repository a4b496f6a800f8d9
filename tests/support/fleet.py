"""The mesh as containers start it: one process a service, told by environment variables alone, on TCP, with Envoy between."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libs.telemetry.trace_store import StoredSpan
from tests.support.envoy import LISTENERS
from tests.support.mesh import scrape
from tools.ports import free_port


@dataclass(eq=False)
class Service:
    """One replica. `port` is where it listens, `metrics_port` where Prometheus asks it."""

    name: str
    instance: str
    port: int
    metrics_port: int
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts its process, again if need be."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLOOM_", "OTEL_"))}
        command = [sys.executable, "-P", "-m", f"services.{self.name}"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**kept, **self.environment})

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """Its process, which has been started."""
        assert self.process is not None
        return self.process

    async def ended(self, seconds: float = 60.0) -> int:
        """Waits for its end; the exit code."""
        return await asyncio.to_thread(self.running.wait, seconds)

    def metrics(self) -> dict[str, float]:
        """Its Prometheus endpoint."""
        return scrape(f"http://127.0.0.1:{self.metrics_port}/metrics")

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.running.kill()
        self.running.wait()


class Collected:
    """Where a trace receiver puts spans: all of them, in the order in which they came."""

    def __init__(self) -> None:
        self._spans: list[StoredSpan] = []

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """See TraceStore."""
        self._spans += spans

    def of(self, trace_id: str) -> list[StoredSpan]:
        """The spans of one trace so far."""
        return [span for span in self._spans if span.trace_id == trace_id]


@dataclass
class Fleet:
    """Two gateways, two tokenizers, a scheduler and a worker; `ports` are those that Envoy must listen on."""

    folder: Path
    model: Path
    collector: int
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in (*LISTENERS, "admin")})
    services: list[Service] = field(default_factory=list)

    def start(self) -> None:
        """Starts every process; none waits for another."""
        tokenizers = [self._add("tokenizer", index, TOKENLOOM_MODEL=str(self.model)) for index in range(2)]
        worker = self._add("worker", 0, TOKENLOOM_MODEL=str(self.model))
        addresses = {
            "TOKENLOOM_WORKER_ADDRESS": f"127.0.0.1:{worker.port}",
            "TOKENLOOM_TOKENIZER_ADDRESS": ",".join(f"127.0.0.1:{tokenizer.port}" for tokenizer in tokenizers),
        }
        scheduler = self._add("scheduler", 0, **addresses)
        for index in range(2):
            self._add(
                "gateway",
                index,
                TOKENLOOM_SCHEDULER_ADDRESS=f"127.0.0.1:{scheduler.port}",
                TOKENLOOM_TOKENIZER_ADDRESS=f"127.0.0.1:{self.ports['tokenizers']}",
                TOKENLOOM_DRAIN_DELAY="2",
            )
        for service in self.services:
            service.start()

    def _add(self, name: str, index: int, **environment: str) -> Service:
        port, instance = free_port(), f"{name}-{index}"
        metrics_port = port if name == "gateway" else free_port()
        where = {"TOKENLOOM_PORT": str(port)} if name == "gateway" else {"TOKENLOOM_LISTEN": f"127.0.0.1:{port}"}
        where |= {"TOKENLOOM_METRICS_PORT": str(metrics_port)} if name != "gateway" else {}
        common = {"TOKENLOOM_INSTANCE": instance, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.collector}"}
        service = Service(name, instance, port, metrics_port, self.folder / f"{instance}.log", {**common, **where, **environment})
        self.services.append(service)
        return service

    def replicas(self, name: str) -> list[Service]:
        """The replicas of a service."""
        return [service for service in self.services if service.name == name]

    def backends(self, name: str) -> Sequence[int]:
        """Their ports."""
        return [service.port for service in self.replicas(name)]

    def stop(self) -> None:
        """Kills whatever still runs."""
        for service in self.services:
            if service.process is not None:
                service.kill()
