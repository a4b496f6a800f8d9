"""Errors in OpenAI's shape, and what an ending means to a client."""

from __future__ import annotations

import math

import msgspec

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.responses import ErrorBody, ErrorDetail

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


def error_struct(error: TokenloomError) -> ErrorBody:
    """The body of an error: `type` by status class, `code` the error's label."""
    spec = error.code.spec
    return ErrorBody(ErrorDetail(error.message, _type_of(spec.http_status), error.param, spec.label))


def error_body(error: TokenloomError) -> bytes:
    """The same as JSON."""
    return msgspec.json.encode(error_struct(error))


def error_headers(error: TokenloomError) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error: Retry-After in whole seconds, at least 1; how to authenticate; no reuse of a closing server."""
    headers = []
    if error.code.spec.retryable:
        seconds = max(1, math.ceil((error.retry_after_ms or 1000) / 1000))
        headers.append((b"retry-after", str(seconds).encode()))
    if error.code is ErrorCode.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.code is ErrorCode.DRAINING:
        headers.append((b"connection", b"close"))
    return headers


def _type_of(status: int) -> str:
    return _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
