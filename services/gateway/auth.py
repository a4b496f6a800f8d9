"""The door of /v1 and of the endpoints that work for it: no request without a valid key, and the key's limits on every answer."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.errors import TokenloomError
from services.gateway.api.ops import error_response
from services.gateway.guarded import GUARDED
from services.gateway.keys import KeyRing
from services.gateway.metrics import GatewayMetrics
from services.gateway.quota import VISIT, Quotas, Visit


class RequireKey:
    """Lets the paths that begin with one of GUARDED be used only with a key of `keys` as bearer token."""

    def __init__(self, app: ASGIApp, keys: KeyRing, quotas: Quotas, metrics: GatewayMetrics) -> None:
        self._app, self._keys, self._quotas, self._metrics = app, keys, quotas, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            key = await self._keys.check(_bearer(scope))
        except TokenloomError as error:
            self._metrics.labelled(self._metrics.rejected, reason=error.code.spec.label).inc()
            await error_response(error)(scope, receive, send)
            return
        if key is None:
            await self._app(scope, receive, send)
            return
        visit = scope[VISIT] = Visit(key, self._quotas)

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *await visit.headers()]
            await send(message)

        await self._app(scope, receive, with_limits if key.limits else send)


def _bearer(scope: Scope) -> bytes:
    given = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
    return given
