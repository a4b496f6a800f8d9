"""A helper process as its owner sees it: start, ask, kill. Its own side is libs/helper_frames.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

from libs.errors import TokenloomError
from libs.helper_frames import ANSWER, ASK, HEADER, READY, REFUSED, frame
from libs.process import PARENT_PID
from tokenloom.common.v1 import common_pb2

# Seconds. A process that has not loaded by then is killed.
START_TIMEOUT = 60.0


class HelperDied(Exception):
    """The process ended, or broke the protocol, before it answered."""


class HelperProcess:
    """One process that answers one question at a time. Stateless between questions, so that it may be killed at any moment."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, nice: int = 0) -> HelperProcess:
        """Starts `command` and waits until it is ready. Raises HelperDied when it ends or is not ready within START_TIMEOUT.

        `nice`: by how much it stands behind this process where both want a core.
        """
        process = cls(
            await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, PARENT_PID: str(os.getpid())},
            )
        )
        try:
            process._stand_back(nice)
            async with asyncio.timeout(START_TIMEOUT):
                kind, _ = await process._read_frame()
            if kind != READY:
                raise HelperDied(f"it said {kind} before it was ready")
        except BaseException as error:
            await process.kill()
            if isinstance(error, TimeoutError):
                raise HelperDied(f"it was not ready within {START_TIMEOUT:g} s") from error
            raise
        return process

    @property
    def pid(self) -> int:
        """The operating system's number for it."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it can be asked, as far as is known."""
        assert self._process.stdout is not None
        return self._process.returncode is None and not self._process.stdout.at_eof()

    async def ask(self, payload: bytes) -> bytes:
        """Its answer. Raises the TokenloomError that refuses the question, or HelperDied."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame(ASK, payload))
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise HelperDied(str(error)) from error
        kind, answer = await self._read_frame()
        if kind == ANSWER:
            return answer
        if kind == REFUSED:
            raise TokenloomError.from_proto(common_pb2.Error.FromString(answer))
        raise HelperDied(f"it answered with a frame of kind {kind}")

    async def kill(self) -> None:
        """Ends it at once and waits for its end."""
        if self._process.returncode is None:
            self._process.kill()
        # Closes the pipes too, which a killed process leaves to its parent; the one that is read closes at its end, which comes after
        # the process's own.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._process.stdout.read()

    def _stand_back(self, nice: int) -> None:
        # From here and not by the process itself: loading its modules is a good part of what it computes before it is ready.
        if nice:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)

    async def _read_frame(self) -> tuple[int, bytes]:
        assert self._process.stdout is not None
        try:
            length, kind = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
            return kind, await self._process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise HelperDied("it ended; its own words are in the log above") from error
