"""A scheduler process in this process, over real gRPC on Unix sockets, between fake workers, a fake tokenizer and gateways' sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.rpc import Server, listen, new_server
from libs.sampling import SamplingParams
from libs.telemetry.tracing import Tracer
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.state import SchedulerState
from services.scheduler.engine import Engine
from services.scheduler.server import SchedulerProcess
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_session import SessionClient
from tests.support.model_worker import text_table
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc


def params(**fields: object) -> SamplingParams:
    """Twenty greedy tokens that ignore the end of sequence; `fields` replace."""
    return SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **fields})  # type: ignore[arg-type]


class _FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    fingerprint = text_table().fingerprint

    async def GetTextTable(self, request: tokenizer_pb2.GetTextTableRequest, context: Any) -> tokenizer_pb2.GetTextTableResponse:  # type: ignore[override]
        table = text_table().to_proto()
        table.tokenizer_fingerprint = self.fingerprint
        return table


class SchedulerMesh:
    """`async with SchedulerMesh(tmp_path, **config) as mesh`: the scheduler listens; workers come with `worker`, sessions with `session`.

    Leaving checks that the core raised nothing, unless it `may_break`, and that no request, block or slot is left behind.
    """

    def __init__(self, directory: Path, *, static_workers: int = 1, **config: Any) -> None:
        self._directory = directory
        self._tokenizer: Server = new_server([])
        self.tokenizer = _FakeTokenizer()
        self._workers: list[FakeWorker] = []
        self._sessions: list[SessionClient] = []
        self._stopped = False
        self.may_break = False
        addresses = [self.worker_address(number) for number in range(static_workers)]
        values = {"drain_timeout": 0.0, **config}
        self.config = SchedulerConfig(
            listen=self._socket("scheduler"), tokenizer_address=[self._socket("tokenizer")], worker_address=addresses, **values
        )
        self.spans = InMemorySpanExporter()
        self._tracer = Tracer("scheduler", "test", exporters=[self.spans])
        self.process = SchedulerProcess(self.config, self._tracer)

    def _socket(self, name: str) -> str:
        return f"unix:{self._directory / name}.sock"

    def worker_address(self, number: int = 0) -> str:
        """Where worker `number` listens."""
        return self._socket(f"worker{number}")

    @property
    def engine(self) -> Engine:
        """The scheduler's engine."""
        assert self.process.engine is not None
        return self.process.engine

    @property
    def state(self) -> SchedulerState:
        """The core's state; there once a worker has attached."""
        assert self.engine.state is not None
        return self.engine.state

    async def sample(self, name: str, **labels: str) -> float:
        """A metric's value, read as a scrape does it: from another thread."""
        found = await asyncio.to_thread(self.process.metrics.registry.get_sample_value, f"tokenloom:{name}", labels)
        assert found is not None, f"no metric {name} {labels}"
        return found

    async def __aenter__(self) -> SchedulerMesh:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self.tokenizer, self._tokenizer.server)
        await listen(self._tokenizer, self._socket("tokenizer"))
        await self.process.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for session in self._sessions:
            await session.close()
        for worker in self._workers:
            worker.gate.set()
        assert self.may_break or not self.engine.broken.is_set(), "the core raised; what, says the log"
        if kind is None and not self._stopped and self.engine.state is not None:
            await asyncio.wait_for(self.settled(), 10)
        await self.stop()
        for worker in self._workers:
            await worker.stop()
            assert worker.violations == []
        await self._tokenizer.stop(0)
        self._tracer.shutdown()

    async def stop(self) -> None:
        """SIGTERM."""
        if not self._stopped:
            self._stopped = True
            await self.process.stop()

    async def worker(self, number: int = 0, **fields: Any) -> FakeWorker:
        """A worker that listens from now on; `fields` are its constructor's and, beyond those, attributes."""
        own = {name: fields.pop(name) for name in ("blocks", "slots", "max_model_len", "step_seconds") if name in fields}
        worker = FakeWorker(**own)
        for name, value in fields.items():
            setattr(worker, name, value)
        await worker.start(self.worker_address(number))
        self._workers.append(worker)
        return worker

    async def session(self, gateway: int = 77, **hello: int) -> SessionClient:
        """A gateway's session; open, but perhaps not ready."""
        session = await SessionClient(self.config.listen, gateway).open(**hello)
        self._sessions.append(session)
        return session

    async def until(self, condition: Any) -> None:
        """Waits for something inside the scheduler that sends no event; the test's own timeout bounds it."""
        while not condition():
            await asyncio.sleep(0.002)

    def pass_grace(self) -> None:
        """Requests that no attached worker holds have waited as long as they may, without the test's waiting with them."""
        since = self.engine.shard.unfit_since
        assert since is not None, "nobody waits for a larger worker"
        self.engine.shard.unfit_since = since - round(self.config.worker_grace * 1e9)

    async def settled(self) -> None:
        """Until nothing is live and nothing in flight; then everything must add up and nothing may be held."""
        state = self.state
        await self.until(lambda: not state.requests and not any(group.in_flight for group in state.groups.values()))
        state.check()
        for group in state.groups.values():
            assert (group.ledger.in_use, group.ledger.draining, group.running) == (0, 0, [])
            assert len(group.free_slots) == len(set(group.free_slots))
