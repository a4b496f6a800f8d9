"""`tokenloom serve`: the whole mesh on one machine, from a model's name to a URL that answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.flags import ServeConfig, ServeOptions, print_help, service_config
from cli.mesh import Mesh, plan
from cli.output import LogFormat, Output
from cli.ports import choose, is_free, reachable_host
from cli.readiness import wait_until_ready
from cli.rundir import RunDirectory
from cli.supervisor import StartFailure, Supervisor
from libs.config import parse
from libs.errors import ErrorCode, TokenloomError
from libs.models import catalog
from services.gateway.config import GatewayConfig


def main(args: Sequence[str]) -> int:
    """Parses the flags and serves until Ctrl-C or SIGTERM; returns the exit code (0 after either, 1 when the mesh cannot start)."""
    if {"-h", "--help"} & set(args):
        print_help(Console())
        return 0
    options = parse(ServeConfig, args, prog="tokenloom serve")
    try:
        return _serve(options)
    except TokenloomError as error:
        print(f"tokenloom serve: error: {error.message}", file=sys.stderr)
        return 2 if error.code is ErrorCode.INVALID_REQUEST else 1
    except KeyboardInterrupt:  # before the mesh runs; from then on signals are handled
        return 130


def _serve(options: ServeOptions) -> int:
    """Claims the port, finds the model, then runs the mesh. Raises TokenloomError before any process is started."""
    log_format = _log_format(options)
    gateway = service_config(GatewayConfig, options)
    _check_host(gateway.host)
    port = gateway.port or choose(gateway.host, 0)
    run_directory = RunDirectory.claim(port)
    try:
        _check_port(gateway.host, port)
        model = catalog.resolve(options.model or None, None, _progress)
        mesh = plan(options, model, port, log_format, run_directory)
        output = Output(log_format)
        try:
            return asyncio.run(_run(mesh, output))
        finally:
            output.close()
    finally:
        run_directory.release()


def _check_host(host: str) -> None:
    try:
        is_free(host, 0)
    except OSError as error:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--host {host}: {error}", param="host") from None


def _check_port(host: str, port: int) -> None:
    try:
        free = is_free(host, port)
    except OSError as error:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--port {port}: {error.strerror}", param="port") from None
    if not free:
        raise TokenloomError(ErrorCode.UNAVAILABLE, f"port {port} on {host} is in use by another program; choose one with --port")


def _log_format(options: ServeOptions) -> LogFormat:
    """What the user chose; else words on a terminal and JSON elsewhere."""
    if "log_format" in options.model_fields_set:
        return options.log_format
    return "console" if sys.stderr.isatty() else "json"


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _run(mesh: Mesh, output: Output) -> int:
    supervisor = Supervisor(mesh.specs, output)
    stop = _stop_on_signals(supervisor, output)
    started = time.monotonic()
    host = reachable_host(mesh.gateway.host)
    supervisor.start()
    ready = asyncio.create_task(
        wait_until_ready(host, mesh.gateway.port, lambda reason: output.event("info", f"not ready yet: {reason}", reason=reason))
    )
    stopped = asyncio.create_task(stop.wait())
    try:
        first: list[asyncio.Future[Any]] = [ready, stopped, supervisor.failure]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not ready.cancelled():
            ready.result()
            supervisor.mark_ready()
            output.say(banner(mesh, time.monotonic() - started))
            await stopped
        failed = supervisor.failure.done() and not stop.is_set()
    finally:
        ready.cancel()
        stopped.cancel()
        await supervisor.stop()
    if failed:
        # Last, below what the other services said while they were ended.
        output.complain(_failure_text(supervisor.failure.result()))
    return int(failed)


def _stop_on_signals(supervisor: Supervisor, output: Output) -> asyncio.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set; a second signal ends every process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            output.event("warning", "ending at once", signal=number.name)
            supervisor.kill()
        else:
            output.event("info", "stopping: running requests may finish; once more to end at once", signal=number.name)
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _failure_text(failure: StartFailure) -> str:
    lines = [f"tokenloom serve: error: {failure.service} {failure.reason} before the mesh was ready"]
    if failure.reason.endswith("SIGKILL"):
        lines.append("  (the kernel kills a process like this when memory runs out: --quantization int8 makes the weights smaller,")
        lines.append("  --kv-cache-memory-bytes and --max-model-len the KV cache)")
    return "\n".join([*lines, *(f"  {failure.service} | {line}" for line in failure.tail)])


def banner(mesh: Mesh, seconds: float) -> str:
    """What the user reads once the mesh is ready; the curl line can be pasted as it stands."""
    port, name = mesh.gateway.port, mesh.gateway.model_names[0]
    url = f"http://{reachable_host(mesh.gateway.host)}:{port}"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "What is a loom?"}], "stream": True})
    key = ' -H "Authorization: Bearer $API_KEY"' if mesh.gateway.api_key else ""
    command = _own_command()
    port_flag = "" if port == 8000 else f" --port {port}"
    rows = [
        ("URL", f"{url}/v1"),
        ("try it", f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"),
        ("the API", f"{url}/docs"),
        ("a trace", f"{command} trace REQUEST_ID{port_flag}    (the `id` of a response, or its x-request-id header)"),
        ("metrics", f"{url}/metrics"),
        *(("", f"{metrics}  ({service})") for service, metrics in mesh.metrics_urls.items()),
        ("stop", "Ctrl-C"),
    ]
    lines = [f"\nTokenloom serves {name}; ready in {seconds:.1f} s", *(f"  {label:<9} {text}" for label, text in rows), ""]
    return "\n".join(lines)


def _own_command() -> str:
    """How the user calls this command: by name where it is on PATH, else by its path from here."""
    own = Path(sys.argv[0]).absolute()
    found = shutil.which("tokenloom")
    if found and Path(found).absolute() == own:
        return "tokenloom"
    with contextlib.suppress(ValueError):
        return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
    return str(own)
