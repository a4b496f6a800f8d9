import asyncio
import http.server
import json
import threading

import pytest

from cli.readiness import Readiness, probe, wait_until_ready


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answers /ready from a script; the last answer stays."""

    def do_GET(self):
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def gateway():
    server = http.server.HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def not_ready(*messages):
    return 503, json.dumps({"reasons": [{"code": "no_worker", "message": message} for message in messages]}).encode()


def test_the_reasons_of_the_gateway_are_told_in_one_line(gateway):
    gateway.answers = [not_ready("no worker has been attached yet", "no session: failed to connect to all addresses; errno 111")]
    assert probe("127.0.0.1", gateway.server_port) == Readiness(False, "no worker has been attached yet; no session")


@pytest.mark.parametrize("body", [b"plain words", b'"a string"', b'{"reasons": 3}', b'{"reasons": ["text"]}'])
def test_an_answer_of_another_shape_is_shown_as_it_is(gateway, body):
    gateway.answers = [(503, body)]
    assert probe("127.0.0.1", gateway.server_port) == Readiness(False, body.decode())


def test_a_gateway_that_does_not_listen_is_starting(gateway):
    assert probe("127.0.0.1", 1) == Readiness(False, "the gateway is starting")


def test_a_proxy_of_the_environment_is_not_asked(gateway, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    gateway.answers = [(200, b"{}")]
    assert probe("127.0.0.1", gateway.server_port).ready


async def test_waiting_tells_each_reason_once(gateway):
    gateway.answers = [not_ready("a"), not_ready("a"), not_ready("b"), (200, b"{}")]
    told = []
    await asyncio.wait_for(wait_until_ready("127.0.0.1", gateway.server_port, told.append), 20)
    assert told == ["a", "b"]
