"""One server's processes: started, waited for until it answers, weighed, and ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

# What somebody set for other programs would change a server: its settings are bench/peers/servers.py's alone. The cache stays where it is.
_FOREIGN = ("TOKENLOOM_", "OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "GGML_", "LLAMA_")
_KEPT = ("TOKENLOOM_CACHE",)
_POLL_S = 0.05
_END_S = 20.0


class StartError(Exception):
    """The server did not come to answer; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What all processes of a server hold, in MB of 10^6 bytes: resident pages, and pages divided among those who share them."""

    rss_mb: float
    pss_mb: float
    processes: int


class ServerProcess:
    """A running server. As a context manager it ends with the block, however that is left. Raises StartError without such a program."""

    def __init__(self, command: list[str], variables: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._started = time.perf_counter()
        everything = inherited() | dict(variables)
        try:
            with log.open("wb") as output:
                self._popen = subprocess.Popen(
                    command, env=everything, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            raise StartError(f"{command[0]} cannot be run: {error}") from error
        self._seen: set[psutil.Process] = {psutil.Process(self._popen.pid)}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def pid(self) -> int:
        """The root of the server's processes."""
        return self._popen.pid

    def wait(self, answers: Callable[[], bool], seconds: float) -> float:
        """Seconds from the start until `answers()` is true for the first time. Raises StartError when the server ends or takes longer."""
        while not answers():
            if self._popen.poll() is not None:
                raise StartError(f"it ended with {self._popen.returncode}; {self._tail()}")
            if time.perf_counter() - self._started > seconds:
                raise StartError(f"it was not ready after {seconds:.0f} s; {self._tail()}")
            time.sleep(_POLL_S)
        return time.perf_counter() - self._started

    def memory(self) -> Memory:
        """What the server's processes hold now."""
        rss = pss = count = 0
        for process in self._tree():
            with suppress(psutil.Error):
                facts = process.memory_full_info()
                rss, pss, count = rss + facts.rss, pss + facts.pss, count + 1
        return Memory(rss / 1e6, pss / 1e6, count)

    def end(self) -> None:
        """Ends all processes, gently for some seconds, and waits until they are gone. A Ctrl-C meanwhile leaves none behind either."""
        members = self._tree() | self._seen
        try:
            with suppress(ProcessLookupError):
                self._popen.send_signal(signal.SIGINT if self._popen.poll() is None else 0)
            _still_alive(members, self._popen)
        finally:
            for process in members:
                if _alive(process):
                    with suppress(psutil.Error):
                        process.kill()
        _still_alive(members, self._popen)

    def _tree(self) -> set[psutil.Process]:
        """The processes alive; they are remembered, since a child whose parent died is found by no walk."""
        for process in list(self._seen):
            with suppress(psutil.Error):
                self._seen.update(process.children(recursive=True))
        return {process for process in self._seen if process.is_running()}

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"the end of {self._log}:", *lines])


def _still_alive(members: set[psutil.Process], root: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """Those that run after some seconds. Orphans that nobody collects are as good as gone: they hold nothing any more."""
    deadline = time.perf_counter() + _END_S
    while True:
        root.poll()
        alive = {process for process in members if _alive(process)}
        if not alive or time.perf_counter() > deadline:
            return alive
        time.sleep(_POLL_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def inherited() -> dict[str, str]:
    """What a server gets of this process's environment: all but the settings of servers and of their libraries."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def answers(url: str, body: bytes | None = None) -> bool:
    """Whether the URL answers 200 (to a POST of JSON where there is a body). No connection and other statuses are a no."""
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"} if body else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as response:
            response.read()
            return int(response.status) == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False
