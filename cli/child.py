"""One service as a child process: started in a session of its own, its output forwarded line by line, ended within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from libs.config.environment import without_settings
from libs.process import PARENT_PID

# A longer line is forwarded in pieces, so that a child that prints without end costs no memory.
MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 20
# How long a pipe that a grandchild still holds open is read after the child itself has ended.
_DRAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How a service is started, and how long it may take to end after SIGTERM (seconds)."""

    name: str
    command: tuple[str, ...]
    stop_seconds: float = 10.0
    essential: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One run of a service's process, from start to exit.

    The child leads a session of its own: Ctrl-C at the terminal reaches the supervisor alone, which ends the services in order.
    """

    def __init__(self, spec: ServiceSpec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._spawned = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id once started."""
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Starts the process and returns its exit code (negative: the signal that ended it). Raises OSError when it cannot start."""
        reader, transport, writing_end = await _open_pipe()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing_end,
                stderr=writing_end,
                start_new_session=True,
                env={**without_settings(os.environ), **self.spec.env, PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            self._ended.set()
            transport.close()
            raise
        finally:
            os.close(writing_end)
            self._spawned.set()
        forwarding = asyncio.create_task(self._forward(reader))
        try:
            code = await process.wait()
            self._signal_group(signal.SIGKILL)  # helpers that the service left behind
            await asyncio.wait([forwarding], timeout=_DRAIN_SECONDS)
            return code
        finally:
            self._ended.set()
            forwarding.cancel()
            transport.close()

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL to the whole group after `stop_seconds`. Returns whether the process ended by itself.

        Only after `run` was called; waits for a start in progress first, so that no process escapes.
        """
        await self._spawned.wait()
        if self._process is None or self._ended.is_set():
            return True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_seconds):
                await self._ended.wait()
            return True
        except TimeoutError:
            self.kill()
            await self._ended.wait()
            return False

    def kill(self) -> None:
        """Ends the process and its helpers at once."""
        if not self._ended.is_set():
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) >= MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._emit(line)
        if pending:
            self._emit(pending)

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)
            self._on_line(self.spec.name, text)


async def _open_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, int]:
    """A pipe's reading end as a stream and its writing end as a file descriptor.

    asyncio's own PIPE would make `wait` wait for the end of the output too, which a helper of a dead service holds open.
    """
    reading_end, writing_end = os.pipe()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reading_end, "rb"))
    return reader, transport, writing_end


def describe_exit(code: int) -> str:
    """An exit code in words: "ended with exit code 2", "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
