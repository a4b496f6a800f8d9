"""The ASGI application: routes, and what surrounds all of them (counting, request ids, CORS, keys)."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.chat import CHAT
from services.gateway.api.completions import COMPLETIONS
from services.gateway.api.docs import docs_routes
from services.gateway.api.endpoint import GenerationEndpoint
from services.gateway.api.ops import error_response, routes
from services.gateway.api.tokenize import DETOKENIZE, TOKENIZE, TextEndpoint
from services.gateway.auth import RequireKey
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics
from services.gateway.quota import HEADER_NAMES
from services.gateway.request_id import EchoRequestId


def new_app(mesh: Mesh) -> Starlette:
    """The gateway's application. Middleware is plain ASGI: BaseHTTPMiddleware would hide a client's departure."""
    config = mesh.config
    middleware = [Middleware(CountResponses, metrics=mesh.metrics), Middleware(EchoRequestId), Middleware(CloseWhenLeaving, mesh=mesh)]
    if config.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "traceparent", "retry-after", *HEADER_NAMES],
        )
        middleware.append(cors)
    if config.api_key or config.api_keys_from_store:
        middleware.append(Middleware(RequireKey, keys=mesh.keys, quotas=mesh.quotas, metrics=mesh.metrics))
    generating = [Route(api.route, GenerationEndpoint(mesh, api), methods=["POST"]) for api in (CHAT, COMPLETIONS)]
    text = [Route(api.route, TextEndpoint(mesh, api), methods=["POST"]) for api in (TOKENIZE, DETOKENIZE)]
    return Starlette(
        routes=[*generating, *text, *routes(mesh), *docs_routes(config)],
        middleware=middleware,
        exception_handlers={HTTPException: _on_http_exception, TokenloomError: _on_error},
    )


async def _on_http_exception(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException), "registered for this class only"
    name = f"{request.method} {request.url.path[:256]}"
    if problem.status_code == 405:
        response = error_response(TokenloomError(ErrorCode.METHOD_NOT_ALLOWED, f"{name}: this method is not allowed here"))
        response.headers.update(problem.headers or {})
        return response
    code = ErrorCode.NOT_FOUND if problem.status_code == 404 else ErrorCode.INVALID_REQUEST
    return error_response(TokenloomError(code, f"{name} does not exist" if problem.status_code == 404 else problem.detail))


async def _on_error(_request: Request, problem: Exception) -> Response:
    assert isinstance(problem, TokenloomError), "registered for this class only"
    return error_response(problem)


class CloseWhenLeaving:
    """Asks every client to connect anew, elsewhere, once this process has been told to leave: a connection that it closes itself might
    just be carrying the next request.
    """

    def __init__(self, app: ASGIApp, mesh: Mesh) -> None:
        self._app, self._mesh = app, mesh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._mesh.leaving:
                others = [(name, value) for name, value in message["headers"] if name != b"connection"]
                message["headers"] = [*others, (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


class CountResponses:
    """Counts responses by route and status; 499 where the client left before there was one."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics
        for api in (CHAT, COMPLETIONS):
            metrics.http_requests.labels(path=api.route, status="200")  # a series from the start: see metrics.py

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.http_requests.labels(path=_route_of(scope["path"]), status=str(status)).inc()


_PATHS = frozenset(
    {
        *(CHAT.route, COMPLETIONS.route, TOKENIZE.route, DETOKENIZE.route),
        *("/v1/models", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"),
    }
)


def _route_of(path: str) -> str:
    """A path as a metric label: clients must not be able to make new ones."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{name}"
    return path if path in _PATHS else "other"
