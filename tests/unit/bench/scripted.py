"""A small HTTP server that plays a script per request, so that the client's timing and judgement can be compared with what was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from bench.http import Target

Play = Callable[["Connection"], Awaitable[None]]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(data: object) -> bytes:
    """One server-sent event of JSON."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(content: str, finish: str | None = None) -> bytes:
    """A chat chunk."""
    return event({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    """The chunk of usage alone."""
    details = {"cached_tokens": cached}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}})


DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Connection:
    """What a script works with: the request that came, and ways to answer."""

    head: str
    body: bytes
    writer: asyncio.StreamWriter
    number: int

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body."""
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def answer(self, status: int, data: bytes) -> None:
        """A whole response."""
        await self.raw(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    async def stream(self, *pieces: bytes) -> None:
        """A whole chunked response of those pieces."""
        await self.raw(STREAM_HEAD)
        for piece in pieces:
            await self.chunk(piece)
        await self.raw(b"0\r\n\r\n")


@dataclass(slots=True)
class ScriptedServer:
    """Where it listens, and every request that came."""

    target: Target
    requests: list[Connection] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.target.host}:{self.target.port}"


@contextlib.asynccontextmanager
async def serving(play: Play) -> AsyncIterator[ScriptedServer]:
    """Serves `play` on a free port of loopback."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.lower().splitlines() if line.startswith("content-length"))
            connection = Connection(head, await reader.readexactly(length), writer, len(server.requests))
            server.requests.append(connection)
            with contextlib.suppress(ConnectionError):
                await play(connection)
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = ScriptedServer(Target("127.0.0.1", listener.sockets[0].getsockname()[1], tls=False))
    async with listener:
        yield server
