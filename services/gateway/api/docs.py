"""The page that shows /openapi.json: Swagger UI, out of its package, so that it works where no network is."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from swagger_ui_bundle import swagger_ui_path

from services.gateway.api.openapi import document
from services.gateway.config import GatewayConfig

_ASSETS = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "favicon-32x32.png": "image/png"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tokenloom API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" type="image/png" href="docs/favicon-32x32.png">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# Addresses are relative: behind a proxy the API may be below a path.
_START = """SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).href,
  dom_id: "#page",
  deepLinking: true,
  validatorUrl: null,
  tryItOutEnabled: true,
  displayRequestDuration: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
});
"""
_HEADERS = {
    # Swagger UI sets styles on its elements, and has its pictures in its style sheet.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_routes(config: GatewayConfig) -> list[Route]:
    """Routes of the document and of its page. They need no key: nothing is in them that the documentation does not say."""
    folder = Path(str(swagger_ui_path))

    @functools.cache
    def described() -> bytes:
        return msgspec.json.encode(document(config))

    async def openapi(_request: Request) -> Response:
        return Response(described(), media_type="application/json")

    async def page(_request: Request) -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    async def start(_request: Request) -> Response:
        return Response(_START, headers=_HEADERS, media_type="text/javascript")

    def asset(name: str) -> Route:
        async def serve(_request: Request) -> Response:
            return FileResponse(folder / name, media_type=_ASSETS[name], headers=_HEADERS)

        return Route(f"/docs/{name}", serve)

    return [Route("/openapi.json", openapi), Route("/docs", page), Route("/docs/start.js", start), *(asset(name) for name in _ASSETS)]
