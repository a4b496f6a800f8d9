"""The machine that a run took place on, the versions on it, and who used its CPU meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.worker.host import usable_cpus

_PACKAGES = ("tokenloom", "torch", "grpcio", "uvicorn", "httptools", "uvloop")
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the client ran; the server's machine too where the URL is local.

    `client_commit` is of the tree that this client runs from, with "+" where it is modified: a server says nothing of its own.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    packages: dict[str, str]
    client_commit: str | None
    load_average_before: float

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            cpu=_cpu_name(),
            cores=usable_cpus(),
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            packages={name: version for name in _PACKAGES if (version := _version(name))},
            client_commit=_commit(),
            load_average_before=round(psutil.getloadavg()[0], 2),
        )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds between two moments, by who used them. `others_cores` is how many cores, on average, the rest of the machine took.

    `server_s` is None where the server's processes are not known: they are then among the others. Steal is time that the machine's host
    gave to somebody else.
    """

    wall_s: float
    client_s: float
    server_s: float | None
    others_s: float
    steal_s: float
    others_cores: float


class CpuMeter:
    """Measures from its making to `stop`. `server` are the roots of the server's processes: their descendants count too."""

    def __init__(self, server: list[psutil.Process]) -> None:
        self._server = server
        self._client = psutil.Process()
        self._started = time.perf_counter()
        self._times = psutil.cpu_times()
        self._client_s = _seconds(self._client)
        self._server_s = self._tree()

    def stop(self) -> CpuUse:
        """What was used since the start. A server's process that ended meanwhile is not counted as the server's."""
        wall = time.perf_counter() - self._started
        times, client_s, server_s = psutil.cpu_times(), _seconds(self._client) - self._client_s, self._tree()
        server = sum(seconds - self._server_s.get(process, 0.0) for process, seconds in server_s.items())
        busy = _busy(times) - _busy(self._times)
        others = max(0.0, busy - client_s - server)  # the kernel counts processes and cores with different grain
        steal = getattr(times, "steal", 0.0) - getattr(self._times, "steal", 0.0)
        return CpuUse(wall, client_s, server if self._server else None, others, steal, others / wall)

    def _tree(self) -> dict[psutil.Process, float]:
        found: dict[psutil.Process, float] = {}
        for root in self._server:
            try:
                members = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            found |= {member: _seconds(member) for member in members}
        return found


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _busy(times: object) -> float:
    """Seconds that all cores worked, of what psutil.cpu_times returns; its fields differ between systems."""
    return float(sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq")))


def server_processes(port: int) -> list[psutil.Process]:
    """Roots of the local server that listens on `port`; empty where none can be seen.

    A mesh listens in one of its processes, so the root is the highest ancestor that runs the same executable as the listener, but
    never an ancestor of this process: that would count the client as the server.
    """
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    pids = {c.pid for c in psutil.net_connections("tcp") if c.pid and c.status == psutil.CONN_LISTEN and c.laddr and c.laddr[1] == port}
    roots = set()
    for pid in pids - ours:
        try:
            root = psutil.Process(pid)
            executable = root.exe()
            for parent in root.parents():
                if parent.pid in ours or parent.exe() != executable:
                    break
                root = parent
        except psutil.Error:
            continue
        roots.add(root)
    return sorted(roots, key=lambda process: process.pid)
