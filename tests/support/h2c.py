"""Just enough HTTP/2 without TLS to ask one question and read the answer: no Python client of ours speaks it by prior knowledge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM = ACK = 1
END_HEADERS = 4
# HPACK's static table: index 8 is `:status: 200`.
STATUS_200 = 0x80 | 8


@dataclass
class Answer:
    """`ok`: the status was 200. `parts` is the body as it came, frame by frame."""

    ok: bool = False
    parts: list[bytes] = field(default_factory=list)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    """A header field as HPACK writes it without any table or compression; names and values under 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


async def post(port: int, path: str, body: bytes) -> Answer:
    """POSTs JSON and reads until the end of the response. Fails on a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "t", "content-type": "application/json"}
    block = b"".join(literal(name, value) for name, value in head.items())
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, body))
    answer, ended = Answer(), False
    try:
        while not ended:
            start = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(start[:3], "big"))
            kind, flags = start[3], start[4]
            assert kind not in (RST_STREAM, GOAWAY), (kind, payload)
            if kind in (SETTINGS, PING) and not flags & ACK:
                writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
            if kind == HEADERS:
                answer.ok = answer.ok or payload[0] == STATUS_200
            if kind == DATA and payload:
                answer.parts.append(payload)
            ended = kind in (DATA, HEADERS) and bool(flags & END_STREAM)
    finally:
        writer.close()
        await writer.wait_closed()
    return answer
