"""A byte proxy on a Unix socket: what passes through it can be cut off, so that a session dies while both of its processes live."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType


class ByteProxy:
    """`async with ByteProxy(listen, target) as proxy`: connections to `listen` reach `target` byte by byte, until `cut`."""

    def __init__(self, listen: Path, target: Path) -> None:
        self._listen, self._target = listen, target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0

    @property
    def address(self) -> str:
        """Where to dial, as gRPC writes it."""
        return f"unix:{self._listen}"

    async def __aenter__(self) -> ByteProxy:
        self._server = await asyncio.start_unix_server(self._serve, self._listen)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        self._listen.unlink(missing_ok=True)

    def cut(self) -> None:
        """Breaks every connection at once, without a word to either side; new ones are taken as before."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, far_writer))
                group.create_task(_copy(far_reader, writer))
        finally:
            self._writers -= ends


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until either side is gone; then the other's goes too."""
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.transport.abort()
