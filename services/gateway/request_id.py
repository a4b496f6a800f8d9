"""The label by which a client, the logs and `tokenloom trace` name a request: x-request-id, echoed by every response."""

from __future__ import annotations

import string
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_MAX_LENGTH = 128
_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=@")


def request_id_of(header: str) -> str:
    """The client's id as it came; a new one where it is missing, too long or has characters that do not belong into logs."""
    if header and len(header) <= _MAX_LENGTH and _CHARACTERS.issuperset(header):
        return header
    return uuid.uuid4().hex


class EchoRequestId:
    """Adds the header to responses that lack it: those of the endpoints that generate nothing, and refusals before any endpoint."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start" and not any(name == HEADER for name, _ in message["headers"]):
                given = next((value for name, value in scope["headers"] if name == HEADER), b"")
                message["headers"] = [*message["headers"], (HEADER, request_id_of(given.decode("latin-1")).encode())]
            await send(message)

        await self._app(scope, receive, labelled)
