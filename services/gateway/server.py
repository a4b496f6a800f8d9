"""A gateway process from start to end: bind, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os

from libs import process
from libs.clock import SystemClock
from libs.errors import TokenloomError
from libs.telemetry.logs import get_logger
from libs.telemetry.metrics import serve_metrics
from libs.telemetry.tracing import Tracer
from services.gateway.app import new_app
from services.gateway.config import GatewayConfig
from services.gateway.http_server import bind, new_server
from services.gateway.mesh import Mesh

_log = get_logger("gateway")


def instance_name(config: GatewayConfig) -> str:
    """The configured name, or one made for this process."""
    return process.instance_name("gateway", config.instance)


async def run(config: GatewayConfig, stop: asyncio.Event) -> int:
    """Serves until `stop` is set, then drains. Returns the process's exit code: 1 when the address cannot be had or --store names none."""
    instance = instance_name(config)
    try:
        tracer = Tracer.of_process("gateway", instance, config.otlp_endpoint)
        mesh = Mesh(config, instance=instance, clock=SystemClock(), tracer=tracer)
        listener, url = bind(config.host, config.port, config.uds)
    except (OSError, TokenloomError) as error:
        _log.error("the gateway cannot start", error=str(error))
        return 1
    tracer.count_in(mesh.metrics.registry)
    server = new_server(new_app(mesh))
    mesh.start()
    serve_metrics(mesh.metrics.registry, config.metrics_host, config.metrics_port)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    statistics = asyncio.create_task(_log_statistics(mesh, config.stats_interval))
    _log.info("the gateway listens", url=url, models=config.model_names)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    _log.info("the gateway drains", open_requests=len(mesh.open), delay_s=config.drain_delay, timeout_s=config.drain_timeout)
    await mesh.drain()
    server.should_exit = True
    await serving
    statistics.cancel()
    await mesh.close()
    if config.uds:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)
    _log.info("the gateway has stopped")
    return 0


async def _log_statistics(mesh: Mesh, interval: float) -> None:
    """One line every `interval` seconds while there is traffic."""
    last_prompt = last_generated = 0
    while True:
        await asyncio.sleep(interval)
        prompt, generated = mesh.traffic.prompt_tokens, mesh.traffic.generated_tokens
        if mesh.open or generated != last_generated or prompt != last_prompt:
            _log.info(
                "statistics",
                open_requests=len(mesh.open),
                outstanding_sequences=mesh.admission.sequences,
                outstanding_tokens=mesh.admission.tokens,
                waiting_for_session=mesh.book.waiting,
                prompt_tokens_per_s=round((prompt - last_prompt) / interval, 1),
                generation_tokens_per_s=round((generated - last_generated) / interval, 1),
            )
        last_prompt, last_generated = prompt, generated
