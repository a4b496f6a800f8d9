"""The client's end of a request: its body, its departure, and writes that it must keep taking off our hands.

A plain ASGI conversation, because a client that leaves is only seen while somebody awaits `receive`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from libs.errors import ErrorCode, TokenloomError

# Seconds a client may pause while it sends its body.
BODY_TIMEOUT = 30.0
# What is read and dropped of a body that is too large, so that the client gets to read the answer before the connection closes.
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_SECONDS = 2.0
# Key in the ASGI scope's extensions under which http_server.py puts the transport's abort.
ABORT = "tokenloom.abort"
Headers = Sequence[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class SlowReader(Exception):
    """The client has not taken anything off a full connection for the time it is given."""


class Connection:
    """One request's conversation. Every method may raise ClientGone; writes may raise SlowReader."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int, slow_reader_timeout: float) -> None:
        self._receive, self._send = receive, send
        self._max_body, self._stall = max_body_bytes, slow_reader_timeout
        self._abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, _nothing)
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._watcher: asyncio.Task[None] | None = None
        self._unread = False
        self.started = False
        self.gone = False

    def header(self, name: bytes) -> str:
        """A request header by lower-case name; the first of several, empty when there is none."""
        return self._headers.get(name, b"").decode("latin-1")

    async def body(self) -> bytearray:
        """The whole body. Raises TokenloomError BODY_TOO_LARGE, for chunked bodies as soon as they are."""
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._max_body:
            raise self._too_large()
        body, more = bytearray(), True
        while more:
            chunk, more = await self._next_part()
            body += chunk
            if len(body) > self._max_body:
                raise self._too_large()
        return body

    def _too_large(self) -> TokenloomError:
        self._unread = True
        return TokenloomError(ErrorCode.BODY_TOO_LARGE, f"The request body exceeds the limit of {self._max_body} bytes")

    async def _next_part(self) -> tuple[bytes, bool]:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                message = await self._receive()
        except TimeoutError:
            self._abort()
            raise ClientGone from None
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` when the client leaves; ends with `close`."""
        self._watcher = asyncio.create_task(self._wait_gone(on_gone))

    async def _wait_gone(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        on_gone()

    async def respond(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A whole JSON response."""
        closing = [(b"connection", b"close")] if self._unread else []
        await self._start(
            status, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *closing, *headers]
        )
        # The end of the response closes the connection; a client still sending would then lose the answer to a reset.
        await self._write(body, more=self._unread)
        if self._unread:
            await self._discard()
            await self._write(b"", more=False)

    async def start_stream(self, headers: Headers) -> None:
        """Status 200 and headers; `write` and `end` follow."""
        await self._start(200, headers)

    async def write(self, data: bytes) -> None:
        """A part of the stream."""
        await self._write(data, more=True)

    async def end(self) -> None:
        """The end of the stream."""
        await self._write(b"", more=False)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _put(self, message: Message) -> None:
        if self.gone:
            raise ClientGone
        try:
            async with asyncio.timeout(self._stall):
                await self._send(message)
        except TimeoutError:
            raise SlowReader from None

    async def _discard(self) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                more = True
                while more and dropped < DISCARD_BYTES:
                    chunk, more = await self._next_part()
                    dropped += len(chunk)
        except (TimeoutError, ClientGone):
            return

    async def cut(self) -> None:
        """Ends the connection at once, dropping what it holds, and waits until the server has noticed."""
        self._abort()
        if self._watcher is not None and self._abort is not _nothing:
            await asyncio.wait({self._watcher}, timeout=1.0)

    def close(self) -> None:
        """Stops watching."""
        if self._watcher is not None:
            self._watcher.cancel()


def _nothing(*_: Any) -> None:
    """Where the server offers no abort (an in-process test client)."""
