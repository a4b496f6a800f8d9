"""gRPC as the whole mesh uses it: bounds, keepalive, health, reflection, and errors that keep their row of the table.

Every service listens through `serve`, every client dials through `connect`, and every unary error passes `abort` on one side
and `error_of` on the other, so that limits and error codes are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from libs.errors import ErrorCode, TokenloomError
from tokenloom.common.v1 import common_pb2

MessageT = TypeVar("MessageT", bound=Message)

PROTOCOL_VERSION = 1
# The health name of liveness: SERVING while the process answers. All other names are readiness, which a healthy process may lack.
LIVE = "live"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# Keepalive finds a peer that vanished without closing (a machine that died) within 20 s + 10 s.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_CLIENT_OPTIONS: list[tuple[str, Any]] = [
    # A restarted peer on the same address should be found within a second, not after the default two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # An HTTP proxy of the environment must not be asked for the mesh's own addresses.
    ("grpc.enable_http_proxy", 0),
]


@dataclass(slots=True)
class Server:
    """A running gRPC server, its health servicer and the address it is bound to."""

    server: grpc.aio.Server
    health: health_aio.HealthServicer
    address: str

    async def set_ready(self, ready: bool) -> None:
        """Answers health checks (of "" and of every service) with SERVING or NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self.health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, lets running ones end for `grace_seconds`, then cancels them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_seconds)

    _names: tuple[str, ...] = ()


def new_server(service_names: Sequence[str]) -> Server:
    """A server with health (NOT_SERVING at first) and reflection. The caller adds its servicers to `.server`, then awaits `listen`."""
    server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    return Server(server, health, "", tuple(service_names))


async def listen(server: Server, address: str) -> str:
    """Binds to `address` ("unix:/path", "host:port", port 0: any) and starts. Returns the bound address.

    Raises OSError when the address cannot be bound.
    """
    try:
        port = server.server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    server.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    await server.set_ready(False)
    await server.health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    await server.server.start()
    return server.address


def connect(address: str) -> grpc.aio.Channel:
    """A channel to one address, with the mesh's bounds and a quick reconnect."""
    return grpc.aio.insecure_channel(address, options=[*_OPTIONS, *_CLIENT_OPTIONS])


_STATUS_CHARACTERS = 200


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TokenloomError, *more: Message) -> NoReturn:
    """Ends a call with the error's gRPC status, and the whole error and `more` messages in the status details."""
    # For those who read nothing but the status: the sentence travels a second time, and percent-encoded.
    status = status_pb2.Status(code=error.code.spec.grpc_status.value[0], message=error.message[:_STATUS_CHARACTERS])
    for message in (error.to_proto(), *more):
        status.details.add().Pack(message)
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status returned")


def detail_of(error: grpc.RpcError, kind: type[MessageT]) -> MessageT | None:
    """The first message of `kind` among the status details that a call ended with."""
    for detail in _details(error):
        message = kind()
        if detail.Unpack(message):
            return message
    return None


def error_of(error: grpc.RpcError, *, unavailable: ErrorCode = ErrorCode.UNAVAILABLE) -> TokenloomError:
    """The error that a call ended with; one without details is mapped from its status (UNAVAILABLE to `unavailable`)."""
    told = detail_of(error, common_pb2.Error)
    if told is not None:
        return TokenloomError.from_proto(told)
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return TokenloomError(
        _FROM_STATUS.get(code, unavailable if code is grpc.StatusCode.UNAVAILABLE else ErrorCode.INTERNAL), text or code.name
    )


_FROM_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_REQUEST,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorCode.PROTOCOL_VIOLATION,
}


def _details(error: grpc.RpcError) -> Sequence[any_pb2.Any]:
    # grpc_status reads calls, and an AioRpcError is none: the key is the one that gRPC reserves for google.rpc.Status.
    metadata = error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None
    for key, value in metadata or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return list(status_pb2.Status.FromString(value).details)
    return ()
