"""One HTTP/1.1 request and its body as it arrives, timed where the bytes come out of the socket.

The client shares its cores with the server that it measures: general clients spend more on a chunk than a small model's server does,
and hand it over only when their task runs next. Here a chunk is timed and handed on in the event loop's own callback.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

OnBody = Callable[[bytes, float], None]


class ConnectError(Exception):
    """No connection could be made."""


class DisconnectedError(Exception):
    """The connection ended before the response did."""


class MalformedError(Exception):
    """What came back is not HTTP, or not what the API promises."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it listens, and what stands before `/v1` in its paths."""

    host: str
    port: int
    tls: bool
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Target:
        """From `http://host:port`, with or without `/v1` at its end. Raises ValueError for other schemes and where the host is missing."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of a server: http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Exchange(asyncio.Protocol):
    """Sends one request once connected, then gives each piece of the body to `on_body` with its time; `ended` when all is there."""

    def __init__(self, request: bytes, on_body: OnBody) -> None:
        self._request = request
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._framed = False
        self._headers_seen = False
        self._now = 0.0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's transports are no subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._end(MalformedError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._headers_seen and not self._framed:  # such a body ends with its connection
            self._end(None)
        else:
            self._end(DisconnectedError(str(exc or "the server closed the connection")))

    def on_header(self, name: bytes, _value: bytes) -> None:
        """httptools' callback."""
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """httptools' callback."""
        self._headers_seen = True

    def on_body(self, body: bytes) -> None:
        """httptools' callback."""
        self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        """httptools' callback."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(int(self._parser.get_status_code()))


async def exchange(target: Target, method: str, path: str, headers: dict[str, str], body: bytes, on_body: OnBody) -> int:
    """Makes one request on a connection of its own; returns the HTTP status once the whole body went through `on_body`.

    Raises ConnectError, DisconnectedError, MalformedError, and whatever `on_body` raises.
    """
    all_headers = {"host": target.authority, "connection": "close", "content-length": str(len(body))} | headers
    head = f"{method} {target.prefix}{path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    tls = ssl.create_default_context() if target.tls else None
    request = head.encode("latin-1") + b"\r\n" + body
    try:
        transport, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(request, on_body), target.host, target.port, ssl=tls
        )
    except OSError as error:
        raise ConnectError(str(error)) from error
    try:
        return await protocol.ended
    finally:
        transport.abort()
