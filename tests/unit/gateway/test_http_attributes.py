"""An HTTP request in its span."""

from __future__ import annotations

import pytest

from services.gateway.http_attributes import http_attributes

SCOPE = {
    "method": "POST",
    "scheme": "https",
    "path": "/v1/completions",
    "http_version": "2",
    "server": ("10.0.0.1", 8000),
    "client": ("10.0.0.9", 4242),
    "headers": [(b"host", b"models.example:8443"), (b"user-agent", b"curl/8"), (b"authorization", b"Bearer secret")],
}


def test_the_head_of_a_request_is_told_without_its_secrets():
    assert http_attributes(SCOPE) == {
        "http.request.method": "POST",
        "url.scheme": "https",
        "url.path": "/v1/completions",
        "network.protocol.version": "2",
        "server.address": "models.example",
        "server.port": 8443,
        "client.address": "10.0.0.9",
        "client.port": 4242,
        "user_agent.original": "curl/8",
    }


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (b"", ("10.0.0.1", 8000)),
        (b"plain", ("plain", None)),
        (b"[::1]:80", ("::1", 80)),
        (b"odd:port", ("odd:port", None)),
        (b"a:123456", ("a:123456", None)),
        (b"x" * 5000, ("x" * 256, None)),
    ],
)
def test_the_host_header_wins_over_the_socket_and_is_bounded(host, expected):
    attributes = http_attributes({**SCOPE, "headers": [(b"host", host)]})
    assert (attributes.get("server.address"), attributes.get("server.port")) == expected


def test_what_a_unix_socket_does_not_know_is_left_out():
    attributes = http_attributes({"method": "POST", "path": "/", "headers": [], "server": None, "client": None})
    assert set(attributes) == {"http.request.method", "url.scheme", "url.path", "network.protocol.version"}
