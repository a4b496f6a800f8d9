"""deploy/healthcheck.py against the servers that it asks in the containers, and against others that it must not hang on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import healthcheck
from libs import rpc

SCRIPT = Path(__file__).parents[3] / "deploy" / "healthcheck.py"


@pytest.fixture
async def server():
    """A service's own gRPC server, not ready yet, and its port."""
    running = rpc.new_server(["tokenloom.worker.v1.WorkerService"])
    address = await rpc.listen(running, "127.0.0.1:0")
    yield running, int(address.rpartition(":")[2])
    await running.stop(0)


@contextlib.contextmanager
def answering(answer: bytes, *, stays: bool = False) -> Iterator[int]:
    """A server for one connection that answers whatever comes with fixed bytes, then closes or stays until the client has gone."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)
            while stays and connection.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(30)


def serving(port: int, service: str = "") -> asyncio.Future[bool]:
    return asyncio.to_thread(healthcheck.grpc_serving, port, service)


async def test_a_service_is_serving_once_it_is_ready_and_not_before_nor_after(server):
    running, port = server
    assert not await serving(port)
    await running.set_ready(True)
    assert await serving(port)
    assert await serving(port, "tokenloom.worker.v1.WorkerService")
    await running.set_ready(False)
    assert not await serving(port)


async def test_it_is_alive_before_it_is_ready(server):
    _, port = server
    assert await serving(port, rpc.LIVE)


async def test_a_service_that_the_server_does_not_know_is_not_serving(server):
    _, port = server
    assert not await serving(port, "tokenloom.nobody")


async def test_many_checks_leave_no_connection_behind(server):
    running, port = server
    await running.set_ready(True)
    assert all(await asyncio.gather(*(serving(port) for _ in range(50))))


@pytest.mark.parametrize(("status", "healthy"), [("200 OK", True), ("503 Service Unavailable", False), ("404 Not Found", False)])
def test_over_http_only_a_200_is_healthy(status, healthy):
    with answering(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()) as port:
        assert healthcheck.http_ok(port, "/ready") is healthy


def test_answers_that_come_byte_by_byte_and_among_other_frames_are_understood(monkeypatch):
    frame, message = healthcheck.frame, healthcheck.message
    answer = (
        frame(0x4, 0, 0, b"\0\x03\0\0\0\x64")  # settings
        + frame(0x6, 0, 0, b"12345678")  # a ping
        + frame(0x8, 0, 0, b"\0\0\1\0")  # a window update
        + frame(0x1, 0x4, 1, b"\x88")  # the headers
        + frame(0x0, 0, 1, message(b"\x08\x01")[:3])
        + frame(0x0, 0, 1, message(b"\x08\x01")[3:])
        + frame(0x1, 0x5, 1, b"\x88")  # the trailers
    )
    with answering(answer, stays=True) as port:
        exactly = healthcheck._exactly
        monkeypatch.setattr(healthcheck, "_exactly", lambda connection, count: b"".join(exactly(connection, 1) for _ in range(count)))
        assert healthcheck.grpc_serving(port)


def test_a_server_that_goes_away_is_not_serving():
    with answering(healthcheck.frame(0x7, 0, 0, b"\0" * 8), stays=True) as port:
        assert not healthcheck.grpc_serving(port)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "http/1"])
def test_what_speaks_no_grpc_is_an_error_and_not_a_hang(monkeypatch, answer):
    monkeypatch.setattr(healthcheck, "_TIMEOUT_SECONDS", 0.2)
    with answering(answer, stays=True) as port, pytest.raises(OSError):
        healthcheck.grpc_serving(port)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as the images run it."""
    return subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)


async def test_as_a_command_its_exit_code_is_the_answer_and_its_output_the_reason(server):
    running, port = server
    not_ready = await asyncio.to_thread(run, "grpc", str(port))
    await running.set_ready(True)
    ready = await asyncio.to_thread(run, "grpc", str(port))
    assert (not_ready.returncode, not_ready.stdout) == (1, "not serving\n")
    assert (ready.returncode, ready.stdout) == (0, "serving\n")


def test_nobody_there_is_unhealthy_and_said():
    nobody = run("grpc", "1")
    assert nobody.returncode == 1
    assert "refused" in nobody.stdout.lower()


@pytest.mark.parametrize("arguments", [(), ("grpc",), ("smtp", "25"), ("grpc", "port")])
def test_wrong_arguments_are_told_from_an_unhealthy_service(arguments):
    wrong = run(*arguments)
    assert wrong.returncode == 2
    assert "usage" in wrong.stdout


def test_it_imports_sockets_and_nothing_that_would_cost_more():
    program = f"import sys; sys.argv = ['x']; import runpy; runpy.run_path({str(SCRIPT)!r}); print(len(sys.modules), 'ssl' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    count, ssl = done.stdout.split()
    assert int(count) < 80
    assert ssl == "False"
