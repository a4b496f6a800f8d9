"""What is no proper request over HTTP: bytes, bodies, types, sizes, paths, methods and headers; each has its answer in OpenAI's shape."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from tests.support.gateway_process import running_gateway
from tests.support.raw_http import RawClient


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    """One gateway for all cases that must leave no trace."""
    async with running_gateway(tmp_path_factory.mktemp("shared")) as running:
        yield running


together = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b"[" * 50_000,
        b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
)
@together
async def test_bytes_that_are_no_json_are_a_400(shared, body):
    response = await shared.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_json")


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"text"', b"true", b'{"a": 1e999}'])
@together
async def test_json_that_is_no_request_is_a_400(shared, body):
    response = await shared.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000, '[{"a": 1e400}]'])
@together
async def test_a_number_that_no_type_holds_is_a_400_that_names_its_field(shared, number):
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "temperature": {number}}}'.encode()
    response = await shared.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", "temperature")
    assert error["message"].startswith("temperature: ")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
@together
async def test_another_content_type_is_a_415(shared, kind):
    response = await shared.client.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_compressed_body_is_a_415(gateway):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await gateway.client.post("/v1/chat/completions", content=b"x", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_charset_beside_the_content_type_is_fine(gateway):
    content = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await gateway.client.post("/v1/chat/completions", content=content, headers=headers)).status_code == 200


async def test_a_body_that_is_too_large_is_a_413_whether_its_length_is_told_or_not(tmp_path):
    async with running_gateway(tmp_path, max_body_bytes=2000) as gateway:
        headers = {"content-type": "application/json"}
        told = await gateway.client.post("/v1/chat/completions", content=b"x" * 3_000_000, headers=headers)

        async def parts():
            for _ in range(300):
                yield b"x" * 10_000

        chunked = await gateway.client.post("/v1/chat/completions", content=parts(), headers=headers)
        for response in (told, chunked):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
            assert "2000 bytes" in response.json()["error"]["message"]


async def test_paths_and_methods_that_do_not_exist_are_answered_in_openais_shape(gateway):
    missing = await gateway.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await gateway.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/%00%ff%2e%2e", 404),
        ("GET", "/v1/models/" + "x" * 5000, 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/../metrics/", 404),
        ("GET", "/%F0%9F%99%82?q=%ff", 404),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("BREW", "/v1/completions", 400),
        ("HEAD", "/health", 200),
    ],
)
@together
async def test_odd_paths_and_methods_are_the_clients_fault(shared, method, path, status):
    async with RawClient(shared.port) as client:
        await client.send(f"{method} {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        assert (await client.read_to_end()).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    "data",
    [
        b"BREW /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
@together
async def test_bytes_that_are_no_http_are_a_400_in_openais_shape(shared, data):
    async with RawClient(shared.port) as client:
        await client.send(data)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")


@together
async def test_an_upgrade_is_not_made_and_no_library_is_recommended(shared, caplog):
    async with RawClient(shared.port) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
    assert "pip install" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        {"x_request_id": "é" * 10},
        {"traceparent": "00-" + "x" * 60000},
        {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "=,=;é" * 5000},
        {"authorization": "Bearer é"},
    ],
)
@together
async def test_odd_headers_change_nothing(shared, headers):
    async with RawClient(shared.port) as client:
        await client.post("/v1/completions", {"prompt": "a"}, **headers, connection="close")
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
