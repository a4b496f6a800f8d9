"""A container's health check: `healthcheck.py grpc PORT [SERVICE]` or `healthcheck.py http PORT PATH`. Exit code 0: healthy.

It runs every few seconds in every container for as long as the mesh is up, and importing grpc alone costs 0.3 s of CPU: so it speaks just
enough HTTP/2 for one grpc.health.v1 Check (RFC 9113, RFC 7541) and imports nothing but sockets. Run it as `python -I -S`, which also leaves
site-packages unread.
"""

import socket
import sys

_TIMEOUT_SECONDS = 2.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0x0, 0x1, 0x4, 0x6, 0x7
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_STREAM = 1
# A message on the wire: uncompressed, its length, its bytes. SERVING is 1 in field 1 of HealthCheckResponse.
_SERVING = b"\x08\x01"
_HEADER_FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(payload: bytes) -> bytes:
    """One gRPC message, uncompressed."""
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def _headers() -> bytes:
    # Literal fields that enter no table, names and values as they are: every one is shorter than the 127 bytes where lengths grow longer.
    return b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in _HEADER_FIELDS)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionError("the connection was closed before an answer came")
        received += piece
    return received


def grpc_serving(port: int, service: str = "", host: str = "127.0.0.1") -> bool:
    """Whether the gRPC health service at `port` says SERVING of `service`. Raises OSError when it cannot be reached or does not answer."""
    name = service.encode()
    request = message(b"\x0a" + bytes((len(name),)) + name if name else b"")
    with socket.create_connection((host, port), _TIMEOUT_SECONDS) as connection:
        connection.sendall(
            _PREFACE
            + frame(_SETTINGS, 0, 0)
            + frame(_HEADERS, _END_HEADERS, _STREAM, _headers())
            + frame(_DATA, _END_STREAM, _STREAM, request)
        )
        answer = b""
        while True:
            head = _exactly(connection, 9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            payload = _exactly(connection, int.from_bytes(head[:3], "big"))
            if kind == _SETTINGS and not flags & _ACK:
                connection.sendall(frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                connection.sendall(frame(_PING, _ACK, 0, payload))
            elif kind == _GOAWAY:
                return False
            elif stream == _STREAM:
                answer += payload if kind == _DATA else b""
                # A refusal (an unknown service) has trailers and no message.
                if flags & _END_STREAM and kind in (_DATA, _HEADERS):
                    return answer == message(_SERVING)


def http_ok(port: int, path: str, host: str = "127.0.0.1") -> bool:
    """Whether GET `path` is answered with a 200. Raises OSError when nobody answers."""
    with socket.create_connection((host, port), _TIMEOUT_SECONDS) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return _exactly(connection, 12)[8:] == b" 200"


def main(arguments: list[str]) -> int:
    """0: healthy; 1: not, and the reason is printed, which `docker inspect` shows; 2: wrong arguments."""
    kind, port, *rest = [*arguments, "", ""][:4] if len(arguments) >= 2 else ("", "", "")
    if kind not in ("grpc", "http") or not port.isdigit():
        print("usage: healthcheck.py grpc PORT [SERVICE] | http PORT PATH")
        return 2
    try:
        healthy = grpc_serving(int(port), rest[0]) if kind == "grpc" else http_ok(int(port), rest[0] or "/")
    except OSError as error:
        print(error)
        return 1
    print("serving" if healthy else "not serving")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
