"""What the commands hear of a server: its chunks as they come, and its errors in words."""

from __future__ import annotations

import httpx
import pytest

from cli.client import ApiClient, ApiError, WrongUsage
from tests.support.scripted_api import ScriptedApi, delta, event, refuses, streams, text

ROUTE = "/v1/chat/completions"


def contents(client: ApiClient) -> list[str]:
    return [choice["delta"].get("content", "") for chunk in client.stream(ROUTE, {}) for choice in chunk["choices"]]


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1(url):
    with ApiClient(url, "key", ScriptedApi(streams(text("a")))) as client:
        assert client.url == "http://h:1"
        assert client.models() == ["tiny", "other"]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://", "http://h:x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ApiError, match="is no address of a server"):
        ApiClient(url)


@pytest.mark.parametrize("key", ["schlüssel", "k\n", "k\x00", " secret"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_told(key):
    with pytest.raises(WrongUsage, match="the key") as caught:
        ApiClient("http://h", key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("data", [b"data: 3\n\n", b'data: "\xff"\n\n'])
def test_a_stream_of_something_else_is_told(data):
    with ApiClient("http://h", "", ScriptedApi(streams([data]))) as client, pytest.raises(ApiError, match="OpenAI-compatible"):
        contents(client)


def test_the_key_is_sent_with_every_request():
    api = ScriptedApi(streams(text("a")))
    with ApiClient("http://h", "secret", api) as client:
        client.models()
        contents(client)
    assert [headers["authorization"] for headers in api.headers] == ["Bearer secret"] * 2


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_read_however_the_network_cuts_them(size):
    body = b": keep-alive\n\n" + b"".join(text("a\u2028b", "\x85é", "😀\n"))
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    with ApiClient("http://h", "", ScriptedApi(streams(parts))) as client:
        assert "".join(contents(client)) == "a\u2028b\x85é😀\n"


def test_an_error_within_a_stream_breaks_it_off():
    parts = [delta(content="a"), event({"error": {"message": "no worker", "code": "no_worker"}}), b"data: [DONE]\n\n"]
    with ApiClient("http://h", "", ScriptedApi(streams(parts))) as client:
        chunks = client.stream(ROUTE, {})
        assert next(chunks)["choices"]
        with pytest.raises(ApiError, match="broke off: no worker") as caught:
            next(chunks)
    assert caught.value.code == "no_worker"


def test_a_stream_that_just_ends_was_broken_off():
    with ApiClient("http://h", "", ScriptedApi(streams([delta(content="a")]))) as client, pytest.raises(ApiError, match="broke off"):
        contents(client)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (refuses(401, "unauthorized", "Invalid key"), "Invalid key; give the key with --api-key"),
        (refuses(404, "model_not_found", "No model x"), "No model x; --model"),
        (refuses(429, "over_window", "Too much", **{"retry-after": "3"}), r"Too much \(try again in 3 s\)"),
        (lambda _: httpx.Response(502, text="<html>"), "502 Bad Gateway"),
        (lambda _: httpx.Response(500, json=[]), "500 Internal Server Error"),
        (lambda _: httpx.Response(400, json={"error": "plain"}), "plain"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_refusal_is_told_in_the_server_s_words_and_with_what_to_do(script, words, streamed):
    with ApiClient("http://h", "", ScriptedApi(script)) as client, pytest.raises(ApiError, match=words):
        list(client.stream(ROUTE, {})) if streamed else client.post(ROUTE, {})


def fails(error: Exception) -> ApiError:
    def handle(_request: httpx.Request) -> httpx.Response:
        raise error

    with ApiClient("http://h:9", "", httpx.MockTransport(handle)) as client, pytest.raises(ApiError) as caught:
        client.models()
    return caught.value


def test_a_server_that_is_down_silent_or_gone_is_told_apart():
    assert "no server answers at http://h:9" in str(fails(httpx.ConnectError("refused")))
    assert "says nothing" in str(fails(httpx.ReadTimeout("")))
    assert "broke: reset" in str(fails(httpx.ReadError("reset")))


@pytest.mark.parametrize("answer", [{"json": {}}, {"text": "hello"}])
def test_a_server_of_another_kind_is_told_apart(answer):
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, **answer))
    with ApiClient("http://h", "", transport) as client, pytest.raises(ApiError, match="OpenAI-compatible"):
        client.models()
