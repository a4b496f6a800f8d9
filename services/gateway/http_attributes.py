"""What an HTTP request looks like in its span, as OpenTelemetry's conventions for HTTP have it. Of the body nothing."""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

# Characters kept of what a client may choose freely.
_MAX_LENGTH = 256


def http_attributes(scope: Scope) -> dict[str, AttributeValue]:
    """The attributes that are known when a request's head has been read."""
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    server = scope.get("server") or ("", None)
    client = scope.get("client") or ("", None)
    host, port = _host_and_port(headers.get(b"host", b"").decode("latin-1")[:_MAX_LENGTH]) or (server[0], server[1])
    attributes: dict[str, AttributeValue] = {
        "http.request.method": scope["method"],
        "url.scheme": scope.get("scheme", "http"),
        "url.path": str(scope["path"])[:_MAX_LENGTH],
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    optional: dict[str, AttributeValue | None] = {
        "server.address": host,
        "server.port": port,
        "client.address": client[0],
        "client.port": client[1],
        "user_agent.original": headers.get(b"user-agent", b"").decode("latin-1")[:_MAX_LENGTH],
    }
    return attributes | {name: value for name, value in optional.items() if value}


def _host_and_port(header: str) -> tuple[str, int | None] | None:
    """What a Host header says; None for an empty one."""
    host, separator, port = header.rpartition(":")
    if separator and port.isdigit() and len(port) <= 5:
        return host.strip("[]"), int(port)
    return (header.strip("[]"), None) if header else None
