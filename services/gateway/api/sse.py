"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from services.gateway.api.responses import ErrorBody
from services.gateway.connection import Connection, Headers

DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
# A comment: every reader of events skips it, and every proxy on the way sees that the stream lives.
KEEP_ALIVE = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()
_T = TypeVar("_T")


def event(data: msgspec.Struct | ErrorBody) -> bytes:
    """One event. JSON has no line breaks outside strings and escapes them inside, so that one `data:` line holds it."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


class EventStream:
    """A streamed response. It begins with the first thing written, so that until then an error still has its own status; from its
    making on it is silent for `keep_alive` seconds at most (0: for as long as there is nothing to say). Methods raise as Connection's.
    """

    def __init__(self, connection: Connection, headers: Headers, keep_alive: float) -> None:
        self._connection, self._headers, self._keep_alive = connection, headers, keep_alive
        self._spoke = asyncio.get_running_loop().time()

    async def wait(self, source: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `source()`, with comments until it comes. `source` is cancelled and called again for each: it must lose nothing."""
        while True:
            try:
                async with asyncio.timeout_at(self._spoke + self._keep_alive if self._keep_alive else None):
                    return await source()
            except TimeoutError:
                await self.write(KEEP_ALIVE)

    async def write(self, data: bytes) -> None:
        """Writes events. Nothing at all is no sign of life, and is not written."""
        if not data:
            return
        if not self._connection.started:
            await self._connection.start_stream([*HEADERS, *self._headers])
        await self._connection.write(data)
        self._spoke = asyncio.get_running_loop().time()

    async def end(self, data: bytes) -> None:
        """Writes the last events, [DONE], and the end."""
        await self.write(data + DONE)
        await self._connection.end()
