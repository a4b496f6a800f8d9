"""`tokenloom serve` around fake services: what it prints, when it ends, and with which code."""

import asyncio
import io
import json
import os
import signal
import socket
import sys

import pytest

from cli import serve as serve_command
from cli.child import ServiceSpec
from cli.mesh import Mesh
from cli.output import Output
from cli.rundir import RunDirectory
from services.gateway.config import GatewayConfig

GATEWAY = """
import http.server, sys

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


LEAVES_WITH_WORDS = """
import signal, sys

def leave(*_):
    print("leaving", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
signal.pause()
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test when a model is looked for."""

    def resolve(*_args):
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(serve_command.catalog, "resolve", resolve)


class Words(io.StringIO):
    """A stream that calls `on_line` when `awaited` is written."""

    def __init__(self, awaited, on_line):
        super().__init__()
        self.awaited, self.on_line = awaited, on_line

    def write(self, text):
        if self.awaited in text:
            self.on_line()
        return super().write(text)


async def run(port, base, *others, awaited="", on_line=lambda: None):
    gateway = ServiceSpec("gateway", (sys.executable, "-c", GATEWAY, str(port)))
    mesh = Mesh((gateway, *others), GatewayConfig(port=port, served_model_name=["tiny"]), {}, base)
    out, err = Words(awaited, on_line) if awaited else io.StringIO(), io.StringIO()
    output = Output("json", out=out, err=err)
    try:
        code = await asyncio.wait_for(serve_command._run(mesh, output), 60)
    finally:
        output.close()
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_mesh_that_is_ready_says_so_and_ends_with_0_on_a_signal(base, port, number):
    code, out, err = await run(port, base, awaited="Tokenloom serves tiny", on_line=lambda: os.kill(os.getpid(), number))
    assert code == 0
    assert f"curl -N http://127.0.0.1:{port}/v1/chat/completions" in out
    assert any(json.loads(line).get("signal") == signal.Signals(number).name for line in err.splitlines() if line.startswith("{"))


async def test_a_service_that_ends_before_the_mesh_is_ready_ends_it_with_1_and_its_last_words(base):
    with socket.socket() as deaf:  # accepts and never answers: /ready stays open
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        port = deaf.getsockname()[1]
        worker = ServiceSpec("worker", (sys.executable, "-c", "print('cannot fit the model'); raise SystemExit(3)"))
        waiting = ServiceSpec("gateway", (sys.executable, "-c", LEAVES_WITH_WORDS))
        mesh = Mesh((waiting, worker), GatewayConfig(port=port), {}, base)
        err = io.StringIO()
        output = Output("json", out=io.StringIO(), err=err)
        code = await asyncio.wait_for(serve_command._run(mesh, output), 60)
        output.close()
    assert code == 1
    assert err.getvalue().endswith("worker ended with exit code 3 before the mesh was ready\n  worker | cannot fit the model\n")


async def test_a_service_that_memory_ran_out_for_is_given_a_hint():
    failure = serve_command.StartFailure("worker", "was killed by SIGKILL", ())
    assert "--kv-cache-memory-bytes" in serve_command._failure_text(failure)


def test_a_port_of_another_program_is_refused_before_a_model_is_looked_for(base, no_model, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve_command.main(["--port", str(port)]) == 1
    assert (
        capsys.readouterr().err
        == f"tokenloom serve: error: port {port} on 127.0.0.1 is in use by another program; choose one with --port\n"
    )


def test_a_second_mesh_on_a_port_is_refused_before_a_model_is_looked_for(base, port, no_model, capsys):
    held = RunDirectory.claim(port)
    assert serve_command.main(["--port", str(port)]) == 1
    assert f"already serving on port {port}" in capsys.readouterr().err
    held.release()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "no such host"], "--host no such host: "),
        (["--host", "192.0.2.1"], "--host 192.0.2.1: "),
        (["--api-key", "a", "--otlp-endpoint", "http://a:4317"], "OTLP/gRPC only"),
        (["/nonexistent/model"], "'/nonexistent/model' is neither a model directory"),
    ],
)
def test_what_cannot_be_served_is_one_line_on_stderr(base, port, monkeypatch, capsys, args, words):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if "otlp" in words.lower():
        monkeypatch.setattr(serve_command.catalog, "resolve", lambda *_args: base)
    assert serve_command.main(["--port", str(port), *args]) in (1, 2)
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_failed_start_gives_the_port_back(base, port, capsys):
    assert serve_command.main(["--port", str(port), "/nonexistent/model"]) == 1
    RunDirectory.claim(port).release()
    capsys.readouterr()


def test_help_ends_with_0_and_starts_nothing(no_model, capsys):
    assert serve_command.main(["--help"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out
