"""uvicorn as the gateway needs it: its signals are ours, and a request can cut its own connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.errors import error_body
from services.gateway.connection import ABORT

# How long an idle connection is kept: longer than any proxy does (Envoy: 30), so that it is never this side that closes one in use.
KEEP_ALIVE_SECONDS = 75


class _Protocol(HttpToolsProtocol):
    """Closing a connection waits until its buffer is sent, which never happens with a client that does not read: offer the abort too."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: self.transport.abort}

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP never reaches the application; its answer has OpenAI's shape all the same."""
        body = error_body(TokenloomError(ErrorCode.INVALID_REQUEST, msg))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a request for an upgrade may be answered without one, and the library to install would not be used."""


class HttpServer(uvicorn.Server):
    """A server that leaves signals to libs.process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server; captures none."""
        yield


def new_server(app: Any) -> HttpServer:
    """A server of `app` on httptools, without access log (the gateway writes its own line) and lifespan events."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
            backlog=2048,
        )
    )


def bind(host: str, port: int, uds: str) -> tuple[socket.socket, str]:
    """A socket to serve on and the URL it is reached at. Raises OSError when the address is taken or not ours."""
    if uds:
        with contextlib.suppress(FileNotFoundError):
            Path(uds).unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(uds)
        return listener, f"unix:{uds}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    name = f"[{host}]" if family is socket.AF_INET6 else host
    return listener, f"http://{name}:{listener.getsockname()[1]}"
