"""A client on a bare socket: it can stop reading, send half a request, and leave at any moment."""

from __future__ import annotations

import asyncio
import json
import socket


class RawClient:
    """One connection. `receive_buffer` bytes is as small as the kernel allows, so that an unread stream fills up soon."""

    def __init__(self, port: int, *, receive_buffer: int = 4096) -> None:
        self._port, self._receive_buffer = port, receive_buffer
        self._socket = socket.socket()
        self.received = b""

    async def __aenter__(self) -> RawClient:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        self._socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Closes the connection."""
        self._socket.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def post(self, path: str, body: dict, **headers: str) -> None:
        """Sends a whole request."""
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: t", "Content-Type: application/json", f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + content)

    async def read(self, size: int = 65536) -> bytes:
        """What is there next; empty at the end of the stream."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        self.received += data
        return data

    async def read_until(self, text: bytes) -> bytes:
        """Reads until `text` has come."""
        async with asyncio.timeout(5):
            while text not in self.received:
                assert await self.read(), self.received
        return self.received

    async def read_to_end(self) -> bytes:
        """Reads until the server closes or resets."""
        async with asyncio.timeout(10):
            try:
                while await self.read():
                    pass
            except ConnectionResetError:
                pass
        return self.received
