"""Endpoints for operators: is it alive, can it serve, what does it serve, what does it count."""

from __future__ import annotations

import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.errors import TokenloomError
from libs.telemetry.metrics import exposition
from services.gateway.api.errors import error_body, error_headers
from services.gateway.api.models import model_card, model_list
from services.gateway.api.responses import Readiness, Reason, Version
from services.gateway.mesh import Mesh

VERSION = importlib.metadata.version("tokenloom")


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def error_response(error: TokenloomError) -> Response:
    """An error in OpenAI's shape."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.code.spec.http_status, headers, media_type="application/json")


def routes(mesh: Mesh) -> list[Route]:
    """Routes of the endpoints that generate nothing."""

    async def health(_request: Request) -> Response:
        """The loop turns, or nobody would answer."""
        return Response(status_code=200)

    async def ready(_request: Request) -> Response:
        """Whether new requests would be served; if not, why."""
        reasons = [Reason(obstacle.code.spec.label, obstacle.message) for obstacle in mesh.obstacles()]
        if reasons:
            return json_response(Readiness(False, reasons), 503, {"retry-after": "1"})
        return json_response(Readiness(True, []))

    async def version(_request: Request) -> Response:
        return json_response(Version(VERSION))

    async def metrics(request: Request) -> Response:
        body, content_type = exposition(mesh.metrics.registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def models(_request: Request) -> Response:
        return json_response(model_list(mesh))

    async def model(request: Request) -> Response:
        return json_response(model_card(mesh, request.path_params["name"]))

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
