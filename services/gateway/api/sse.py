"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import msgspec

from services.gateway.api.types import ErrorBody

DONE = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct | ErrorBody) -> bytes:
    """One event. JSON has no line breaks outside strings and escapes them inside, so that one `data:` line holds it."""
    return b"data: " + _encoder.encode(data) + b"\n\n"
