"""The scheduler process: puts the parts together, finds workers and the text table, serves, drains.

Start: store, fencing token, text table from a tokenizer replica, then listen; ready once a worker is attached.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable

import grpc

from libs.addresses import advertised
from libs.clock import SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.process import guard
from libs.rpc import Server, connect, error_of, listen, new_server
from libs.store import Store, StoreError, open_store
from libs.store.registry import WORKERS, Member, keep_registered, members, schedulers
from libs.telemetry.logs import get_logger
from libs.telemetry.metrics import serve_metrics
from libs.telemetry.tracing import Tracer
from libs.text.table import TextTable
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.sessions import SchedulerServicer
from services.scheduler.stats import StatsLine
from services.scheduler.workers import WorkerLink
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

# Seconds between looks at the registry: while nobody can serve, and while somebody does.
_REGISTRY_SECONDS = 0.25
_REGISTRY_SERVED_SECONDS = 1.0
_TABLE_TIMEOUT = 10.0
# Seconds without any worker after which those that were refused count: one that fits may only have been away for a moment.
_MISFIT_SECONDS = 5.0

log = get_logger(__name__)


async def fetch_table(addresses: list[str]) -> TextTable:
    """The text table from the first tokenizer replica that answers; tries them in turn until one does."""
    said = ""
    while True:
        for address in addresses:
            async with connect(address) as channel:
                stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                try:
                    answer = await stub.GetTextTable(tokenizer_pb2.GetTextTableRequest(), timeout=_TABLE_TIMEOUT, wait_for_ready=True)
                    table = TextTable.from_proto(answer)
                except (grpc.RpcError, ValueError) as error:
                    reason = error_of(error).message if isinstance(error, grpc.RpcError) else str(error)
                    if reason != said:
                        log.info("waiting for a tokenizer's text table", tokenizer=address, reason=reason)
                        said = reason
                    continue
            if not table.verified:
                log.warning("text table is not exact: stop strings will be refused", tokenizer=address)
            return table
        await asyncio.sleep(0.2)


async def _first(*events: asyncio.Event) -> None:
    """Returns once one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class SchedulerProcess:
    """Everything that runs in the process, for `run` and for tests."""

    def __init__(
        self, config: SchedulerConfig, tracer: Tracer, on_attached: Callable[[], None] = lambda: None, *, instance: str = "scheduler"
    ) -> None:
        """`on_attached`: see Engine; `instance`: its name in the registry."""
        self.config, self._instance = config, instance
        self._on_attached = on_attached
        self.clock = SystemClock()
        self.tracer = tracer
        self.metrics = SchedulerMetrics()
        self.server: Server = new_server([scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name])
        self.links: dict[str, WorkerLink] = {}
        self.engine: Engine | None = None
        self._store: Store | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Comes up; returns once it listens.

        Raises OSError when an address is taken, TokenloomError (INVALID_REQUEST) when the configuration names no tokenizer or no worker, or
        a store that there cannot be. One that is away is no obstacle.
        """
        config = self.config
        if not config.tokenizer_address:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, "no tokenizer to ask for the text table", param="--tokenizer-address")
        if not config.store and not config.worker_address:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, "no worker to serve: give its address or a store", param="--worker-address")
        self._store = store = open_store(config.store, self.metrics.store) if config.store else None
        table = await fetch_table(config.tokenizer_address)
        engine = Engine(config, self.clock, self.tracer, self.metrics, await Leadership.take(store), table, self._on_attached)
        self.engine = engine
        self.metrics.watch(asyncio.get_running_loop(), lambda: engine.state)
        serve_metrics(self.metrics.registry, config.metrics_host, config.metrics_port)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(engine.intake, config.shard), self.server.server)
        address = await listen(self.server, config.listen)
        log.info("scheduler listens", address=address, fencing_token=engine.fencing_token)
        for worker in config.worker_address:
            self._link(worker)
        self._tasks = [
            guard(asyncio.create_task(self._tick(), name="tick")),
            guard(asyncio.create_task(self._watch_model(engine), name="model")),
        ]
        if store is not None:
            self._tasks += [
                guard(asyncio.create_task(self._watch_registry(store), name="registry")),
                guard(asyncio.create_task(self._register(store, engine), name="registration")),
            ]

    @property
    def _served(self) -> bool:
        return any(link.attached for link in self.links.values())

    def _link(self, address: str) -> None:
        if self.engine is not None and address not in self.links:
            self.links[address] = WorkerLink(address, self.engine)
            self.links[address].start()

    async def _register(self, store: Store, engine: Engine) -> None:
        """Tells gateways where it is, and by its token whether it is the last one to lead."""
        config = self.config
        address = await advertised(self.server.address, config.advertise_address, towards=store.host)
        await keep_registered(store, schedulers(config.shard), lambda: Member(address, self._instance, engine.fencing_token))

    async def _watch_registry(self, store: Store) -> None:
        """Follows the registry: new workers are dialled, vanished ones are dropped once their stream has ended."""
        failing = False
        while True:
            try:
                known = {member.address for member in await members(store, WORKERS)}
            except StoreError as error:
                if not failing:
                    log.warning("worker registry cannot be read; known workers stay", reason=str(error))
                failing = True
            else:
                if failing:
                    log.info("worker registry can be read again", workers=len(known))
                failing = False
                await self._follow(known | set(self.config.worker_address))
            await asyncio.sleep(_REGISTRY_SERVED_SECONDS if self._served else _REGISTRY_SECONDS)

    async def _follow(self, known: set[str]) -> None:
        for address in known - self.links.keys():
            self._link(address)
        for address in [address for address, link in self.links.items() if address not in known and not link.attached]:
            await self.links.pop(address).stop()

    async def _tick(self) -> None:
        stats = StatsLine(self.config.stats_interval)
        while self.engine is not None:
            self.engine.tick()
            await self.server.set_ready(not self.engine.draining and self._served)
            stats.tick(self.engine.state)
            await asyncio.sleep(0.5)

    async def _watch_model(self, engine: Engine) -> None:
        """Makes way for the next scheduler when tokenizers and workers serve another model: this one has the old one's text table."""
        while True:
            await asyncio.sleep(_MISFIT_SECONDS / 5)
            alone = self.clock.monotonic_ns() - engine.shard.without_worker_since
            if engine.shard.misfit is not None and not self._served and alone > _MISFIT_SECONDS * 1e9:
                engine.make_way((await fetch_table(self.config.tokenizer_address)).fingerprint)

    async def deposed(self) -> None:
        """Returns once this scheduler must end by itself: another one leads or should start, or the core broke."""
        if self.engine is not None:
            await _first(self.engine.superseded, self.engine.broken)

    async def stop(self) -> None:
        """Drains: refuses submits, lets live requests go on for the drain timeout, cancels the rest, then ends every stream.

        A scheduler whose core broke ends every stream at once: gateways take that for its loss.
        """
        engine = self.engine
        if engine is not None and not engine.broken.is_set():
            engine.drain()
            # A leader that was replaced has nobody to run what is live: its gateways take it to the new one.
            patience = 0 if engine.superseded.is_set() else self.config.drain_timeout
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await _first(engine.idle, engine.broken)
            engine.intake.end_all()
        broken = engine is not None and engine.broken.is_set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.stop(0.0 if broken else 0.5)  # within which the sessions' writers send the last endings
        await asyncio.gather(*(link.stop() for link in self.links.values()))
        if self._store is not None:
            await self._store.close()


def _freeze_heap() -> None:
    """Takes what is alive now, the ledger's blocks above all, out of the garbage collector's sight.

    A full collection walks every object and stops the loop meanwhile: with 120,000 blocks 45 ms, in one step of a hundred at 2,048 running
    requests. Nothing here is garbage in a circle, and reference counts still free all of it.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def run(config: SchedulerConfig, instance: str, stop: asyncio.Event) -> int:
    """Serves until `stop` is set; returns the exit code."""
    try:
        tracer = Tracer.of_process("scheduler", instance, config.otlp_endpoint)
    except TokenloomError as error:
        log.error("scheduler cannot start", reason=error.message, flag=error.param)
        return 1
    process = SchedulerProcess(config, tracer, _freeze_heap, instance=instance)
    tracer.count_in(process.metrics.registry)
    start = asyncio.create_task(process.start())
    await asyncio.wait([start, stopping := asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    if start.done():
        try:
            start.result()
        except (OSError, TokenloomError) as error:
            log.error("scheduler cannot start", reason=str(error), flag=getattr(error, "param", None))
            stopping.cancel()
            return 1
        deposed = asyncio.create_task(process.deposed())
        await asyncio.wait([stopping, deposed], return_when=asyncio.FIRST_COMPLETED)
        code = 0 if stopping.done() else 1
        stopping.cancel()
        deposed.cancel()
    else:
        code = 0
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    log.info("scheduler stops")
    await process.stop()
    await asyncio.to_thread(tracer.shutdown)
    return 1 if process.engine is not None and process.engine.broken.is_set() else code
