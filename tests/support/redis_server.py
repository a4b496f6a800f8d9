"""A real redis-server of the test run: on a free port, in a directory of its own, ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.binaries import need
from tools.ports import free_port


class RedisServer:
    """`start` and `kill` as often as wanted: it keeps its port and comes back empty (nothing is saved)."""

    def __init__(self, directory: Path) -> None:
        self._program = need("redis-server", install="apt-get install redis-server")
        self._directory = directory
        self.port = free_port()
        self.socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, prefix: str = "tokenloom") -> str:
        """For --store."""
        return f"redis://127.0.0.1:{self.port}/0?prefix={prefix}"

    def start(self) -> None:
        """Returns once it answers."""
        command = [self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket), "--save", ""]
        self._process = subprocess.Popen([*command, "--dir", str(self._directory)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False

    def kill(self) -> None:
        """As a machine that dies; what it held is gone."""
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It takes connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again, what it was asked meanwhile too."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)
