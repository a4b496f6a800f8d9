"""Keeps the mesh's processes alive, and ends them in order.

Until the mesh has been ready once, a service that ends is a failure of the start (bad flags, a model that does not fit) and ends the
mesh: starting it again would only hide the message. From then on a service that ends is started again after a delay that doubles from
0.5 s to 30 s and falls back after a minute of health.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cli.child import Child, ServiceSpec, describe_exit
from cli.output import Output


@dataclass(slots=True)
class Backoff:
    """Delays between restarts, in seconds."""

    first: float = 0.5
    longest: float = 30.0
    healthy_after: float = 60.0
    _next: float = 0.0

    def after(self, uptime: float) -> float:
        """The delay after a run of `uptime` seconds."""
        delay = self.first if uptime >= self.healthy_after or not self._next else self._next
        self._next = min(delay * 2, self.longest)
        return delay


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A service that ended before the mesh was ready: what happened, and its last lines of output."""

    service: str
    reason: str
    tail: tuple[str, ...]


class Supervisor:
    """Runs one process per spec. `stop` ends them in the order of `specs`, one after the other."""

    def __init__(self, specs: Sequence[ServiceSpec], output: Output, *, backoff: Backoff | None = None) -> None:
        self._specs = tuple(specs)
        self._output = output
        self._backoff = backoff or Backoff()
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = False
        self._stopping = asyncio.Event()
        self._killed = False
        self.failure: asyncio.Future[StartFailure] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Starts every service. Call it in the main thread: the kernel ties the children's life to the thread that forks them."""
        self._tasks = [asyncio.create_task(self._keep_alive(spec), name=spec.name) for spec in self._specs]

    def mark_ready(self) -> None:
        """From now on a service that ends is started again."""
        self._ready = True

    def pid(self, service: str) -> int | None:
        """The process id of a service's current run."""
        child = self._children.get(service)
        return child.pid if child else None

    async def stop(self) -> None:
        """Ends all services, each within its bound; returns when no process is left."""
        self._stopping.set()
        for spec in self._specs:
            child = self._children.get(spec.name)
            if child is not None and not await child.stop() and not self._killed:
                self._output.event(
                    "warning", f"{spec.name} did not end within {spec.stop_seconds:g} s and was killed", killed_service=spec.name
                )
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Ends all services at once; a `stop` in progress then returns."""
        self._stopping.set()
        self._killed = True
        for child in self._children.values():
            child.kill()

    async def _keep_alive(self, spec: ServiceSpec) -> None:
        backoff = Backoff(self._backoff.first, self._backoff.longest, self._backoff.healthy_after)
        while not self._stopping.is_set():
            child = self._children[spec.name] = Child(spec, self._output.forward)
            started = time.monotonic()
            try:
                reason = describe_exit(await child.run())
            except OSError as error:
                reason = f"could not be started: {error}"
            if self._stopping.is_set():
                return
            if spec.essential and not self._ready:
                self._report_failure(StartFailure(spec.name, reason, tuple(child.tail)))
                return
            uptime = time.monotonic() - started
            delay = backoff.after(uptime)
            self._output.event(
                "error",
                f"{spec.name} {reason} after {uptime:.1f} s; starting it again in {delay:g} s",
                failed_service=spec.name,
                reason=reason,
                uptime_seconds=round(uptime, 3),
                restart_in_seconds=delay,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    def _report_failure(self, failure: StartFailure) -> None:
        if not self.failure.done():
            self.failure.set_result(failure)
