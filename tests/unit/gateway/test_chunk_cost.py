"""What the gateway runs for one token of a stream, counted as calls, so that no clock matters."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from services.gateway.api.chat_writer import ChatWriter
from services.gateway.api.messages import MessageReader
from services.gateway.api.sse import event
from services.gateway.wanted import Shown
from tests.support.responses import response_of

# Calls of Python and of native code, from a token on its ticket to the bytes of its chunk; a fifth above what was counted.
MOST_CALLS = 50
HELLO = 257


def test_a_chunk_of_one_token_takes_few_calls():
    response = response_of(Shown())
    form = response.form()
    writer, choice = ChatWriter(form, MessageReader), form.choices[0]
    calls, chunks = 0, []

    def count(_: FrameType, kind: str, __: Any) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    def one_token() -> None:
        choice.ticket.output.append(HELLO)
        change = choice.advance()
        assert change is not None
        chunk = writer.chunk(change)
        assert chunk is not None
        chunks.append(event(chunk))

    one_token()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        one_token()
    finally:
        sys.setprofile(before)
    assert b"hello" in chunks[-1]
    assert calls <= MOST_CALLS
