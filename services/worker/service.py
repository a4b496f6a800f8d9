"""One worker process from start to end: listen, load, register, serve, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from libs import rpc
from libs.addresses import advertised
from libs.errors import TokenloomError
from libs.process import guard
from libs.store import Store, open_store
from libs.store.registry import WORKERS, Member, keep_registered
from libs.telemetry.logs import get_logger
from libs.telemetry.metrics import serve_metrics
from libs.telemetry.tracing import SpanRecord, Tracer
from services.worker.config import WorkerConfig
from services.worker.constraints.prepared import Constraints
from services.worker.constraints.preparing import CompilerLimits, Preparer, compiler
from services.worker.constraints.registry import load_constraints
from services.worker.engine import load
from services.worker.metrics import WorkerMetrics
from services.worker.runner import Runner
from services.worker.server import WorkerServicer
from services.worker.step_log import StepLog
from services.worker.steps import Steps
from tokenloom.worker.v1 import worker_pb2_grpc

_log = get_logger(__name__)
_SERVICE = "tokenloom.worker.v1.WorkerService"
# What streams get after the last step's answer to see their end before they are cut.
_GRACE_SECONDS = 2.0


async def serve(config: WorkerConfig, instance: str, stop: asyncio.Event) -> int:
    """Runs until `stop` is set; returns the exit code (1: the model cannot be loaded or the address cannot be bound)."""
    loop = asyncio.get_running_loop()
    try:
        metrics = WorkerMetrics()
        store = open_store(config.store, metrics.store) if config.store else None
        tracer = Tracer.of_process("worker", instance, config.otlp_endpoint)
        log = StepLog(config.record_steps) if config.record_steps is not None else None
    except TokenloomError as error:
        _log.error("cannot start", reason=error.message)
        return 1
    tracer.count_in(metrics.registry)
    outcome: asyncio.Future[Steps | BaseException] = loop.create_future()

    def emit(span: SpanRecord) -> None:
        loop.call_soon_threadsafe(tracer.emit, span)

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)

    def prepare() -> Steps:
        started = time.monotonic()
        engine = load(config)
        metrics.loaded(time.monotonic() - started, engine.facts.num_blocks)
        constraints = load_constraints(config.structured_outputs_config_backend, config.model, engine.facts)
        engine.settle()  # last: threads that start later would inherit the one core
        return Steps(engine, metrics, emit, constraints)

    runner = Runner(prepare, on_loaded=lambda result: _resolve(loop, outcome, result), on_broken=end, log=log)
    servicer, server = WorkerServicer(runner), rpc.new_server([_SERVICE])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    try:
        serve_metrics(metrics.registry, config.metrics_host, config.metrics_port)
        address = await rpc.listen(server, config.listen)
    except OSError as error:
        _log.error("cannot start", reason=str(error))
        return 1
    _log.info("listening; loading the model", address=address, model=str(config.model))
    runner.start()
    code = await _until_loaded(stop, server, servicer, outcome, lambda loaded: _preparer(config, loaded.constraints, metrics))
    if code is None:
        code = await _serve_registered(config, instance, stop, server, store)
    await server.health.enter_graceful_shutdown()
    await servicer.drain()
    await server.stop(_GRACE_SECONDS)
    await asyncio.to_thread(tracer.shutdown)
    _log.info("stopped", exit_code=code)
    return code


async def _until_loaded(
    stop: asyncio.Event,
    server: rpc.Server,
    servicer: WorkerServicer,
    outcome: asyncio.Future[Steps | BaseException],
    preparer: Callable[[Steps], Preparer | None],
) -> int | None:
    """Waits for the model; None once it is served. 1 when it cannot be loaded, 0 when `stop` came before."""
    stopped = asyncio.create_task(stop.wait())
    waiting: list[asyncio.Future[Any]] = [stopped, outcome]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        return 0
    result = outcome.result()
    if isinstance(result, BaseException):
        stopped.cancel()
        reason = result.message if isinstance(result, TokenloomError) else repr(result)
        _log.error("the model cannot be loaded", reason=reason, exc_info=None if isinstance(result, TokenloomError) else result)
        return 1
    stopped.cancel()
    servicer.loaded(result.facts, preparer(result))
    await server.set_ready(True)
    _log.info("ready", address=server.address)
    return None


def _preparer(config: WorkerConfig, constraints: Constraints | None, metrics: WorkerMetrics) -> Preparer | None:
    """What prepares constraints, its compiler starting; None: this worker takes none."""
    if constraints is None:
        return None
    limits = CompilerLimits(config.constraint_compilers, config.constraint_queue, config.constraint_timeout, config.constraint_memory_bytes)
    pool = compiler(config.model, constraints.backend.name, limits, metrics.compilers)
    preparer = Preparer(pool, constraints, metrics.constraint)
    preparer.start()
    return preparer


async def _serve_registered(config: WorkerConfig, instance: str, stop: asyncio.Event, server: rpc.Server, store: Store | None) -> int:
    """Serves until `stop`, in the store's registry where there is one."""
    if store is None:
        await stop.wait()
        return 0
    member = Member(await advertised(server.address, config.advertise_address, towards=store.host), instance)
    registration = guard(asyncio.create_task(keep_registered(store, WORKERS, lambda: member), name="registration"))
    await stop.wait()
    registration.cancel()
    await asyncio.gather(registration, return_exceptions=True)
    await store.close()
    return 0


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Steps | BaseException], result: Steps | BaseException) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(result)

    loop.call_soon_threadsafe(resolve)
