"""The process that keeps the mesh's traces: `python -m cli.trace_receiver --listen unix:/path --database /path`.

A process of its own, so that a burst of spans takes no time from the supervisor or from a service.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from cli.trace_settings import TraceKeepingSettings
from libs.clock import SystemClock
from libs.config import ServiceConfig, Settings, parse
from libs.process import run_service
from libs.telemetry import logs
from libs.telemetry.trace_keeping import TraceKeeper
from libs.telemetry.trace_store import TraceStore, TraceStoreError
from libs.telemetry.trace_store_otlp import serve_traces

_log = logs.get_logger(__name__)
# Seconds between looks at traces that may be complete.
_SETTLE_INTERVAL = 1.0


class StoreSettings(Settings):
    """The store."""

    listen: str = Field(description='OTLP/gRPC address: "unix:/path" or "host:port".')
    database: str = Field(description="SQLite file that keeps the traces.")
    max_traces: int = Field(10_000, ge=1, description="How many traces are kept; the oldest go first.")
    max_trace_bytes: int = Field(256 * 1024 * 1024, ge=1, description="How many bytes of spans are kept; the oldest traces go first.")


class TraceReceiverConfig(StoreSettings, TraceKeepingSettings, ServiceConfig):
    """The built-in trace store."""


async def run(config: TraceReceiverConfig, stop: asyncio.Event) -> int:
    """Receives until `stop`; then what has arrived is stored and the file closed."""
    try:
        store = TraceStore(Path(config.database), max_traces=config.max_traces, max_bytes=config.max_trace_bytes)
        policy = config.keep_policy
        keeper = None if policy.keeps_all else TraceKeeper(store, policy, SystemClock())
        server = serve_traces(keeper or store, config.listen)
    except (TraceStoreError, OSError) as error:
        _log.error("The trace store cannot start", error=str(error))
        return 1
    _log.debug("Receiving traces", listen=config.listen, database=config.database)
    settling = asyncio.create_task(_settle(keeper)) if keeper else None
    await stop.wait()
    if settling:
        settling.cancel()
    await asyncio.to_thread(server.stop(1.0).wait)
    store.close()
    return 0


async def _settle(keeper: TraceKeeper) -> None:
    while True:
        await asyncio.sleep(_SETTLE_INTERVAL)
        try:
            await asyncio.to_thread(keeper.settle)
        except TraceStoreError as error:
            _log.warning("Traces that were to be deleted stay", error=str(error))


def main(args: Sequence[str]) -> int:
    """Parses flags and runs until SIGTERM."""
    config = parse(TraceReceiverConfig, args, prog="tokenloom-traces")
    logs.configure("traces", config.instance or "traces", level=config.log_level, log_format=config.log_format)
    return run_service(lambda stop: run(config, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
