"""What every service process does at its start and end: die with its parent, name itself, run one coroutine until told to stop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from libs.telemetry.logs import get_logger

PARENT_PID = "TOKENLOOM_PARENT_PID"
_PR_SET_PDEATHSIG = 1

_log = get_logger(__name__)


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the parent dies, if the parent asked for it by the PARENT_PID variable (Linux; elsewhere nothing).

    The kernel signals the death of the parent THREAD that forked; `cli serve` forks from its main thread for this reason.
    """
    parent = os.environ.pop(PARENT_PID, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the request was in place
        os._exit(1)


def instance_name(service: str, configured: str) -> str:
    """The configured name of this process, else one that tells it from its replicas: by pid, or by host in a container, where all are 1."""
    pid = os.getpid()
    return configured or f"{service}-{socket.gethostname() if pid == 1 else pid}"


def run_service(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Runs `main(stop)` on uvloop until it returns its exit code; SIGTERM and SIGINT set `stop`, a second one ends the process at once."""
    die_with_parent()
    return uvloop.run(_until_stopped(main))


async def _until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await main(stop)


def guard(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Ends the process in an orderly way (as SIGTERM does) when a task that must run for ever ends by an exception; returns the task.

    A service whose registry or readiness nobody refreshes any more looks alive and is not: its supervisor should start a new one.
    """

    def ended(done: asyncio.Task[Any]) -> None:
        if not done.cancelled() and done.exception() is not None:
            _log.error("background task broke; the process ends", task=done.get_name(), exc_info=done.exception())
            os.kill(os.getpid(), signal.SIGTERM)

    task.add_done_callback(ended)
    return task
