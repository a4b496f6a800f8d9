"""Servers are started, waited for and ended with everything that they started."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench.peers.process import ServerProcess, StartError, answers, inherited
from tools.ports import free_port

_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pause()"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_a_server_is_ready_when_it_answers_and_no_process_of_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.peers.process._END_S", 0.5)
    port, log = free_port(), tmp_path / "log"
    with ServerProcess([sys.executable, "-c", _SERVER, str(port)], {}, log) as process:
        assert process.wait(lambda: answers(f"http://127.0.0.1:{port}/"), 60) > 0
        child = psutil.Process(int(log.read_text().split()[1]))
        memory = process.memory()
        assert memory.processes == 2
        assert memory.rss_mb >= memory.pss_mb > 1
    assert not psutil.pid_exists(process.pid)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_says_what_its_log_says(tmp_path: Path):
    with (
        ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log") as process,
        pytest.raises(StartError, match="no such model"),
    ):
        process.wait(lambda: False, 60)


def test_a_second_interrupt_while_a_server_ends_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    process = ServerProcess([sys.executable, "-c", stubborn], {}, tmp_path / "log")
    process.wait(lambda: "deaf" in (tmp_path / "log").read_text(), 60)
    root = psutil.Process(process.pid)

    def interrupt(_members: object, _root: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.peers.process._still_alive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.end()
    process._popen.wait(60)
    assert not root.is_running()


def test_settings_of_servers_and_their_libraries_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("TOKENLOOM_CPU_ISA", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "TOKENLOOM_CACHE"):
        monkeypatch.setenv(name, "1")
    assert {name for name in inherited() if name.startswith(("TOKENLOOM", "OMP", "VLLM"))} == {"TOKENLOOM_CACHE"}
    assert "PATH" in inherited()
    shown = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['VLLM_CPU_KVCACHE_SPACE'], flush=True)"
    with ServerProcess([sys.executable, "-c", shown], {"VLLM_CPU_KVCACHE_SPACE": "4"}, tmp_path / "log") as process:
        process._popen.wait(60)
    assert (tmp_path / "log").read_text().split() == ["None", "4"]


def test_a_port_without_a_listener_does_not_answer():
    assert not answers(f"http://127.0.0.1:{free_port()}/health")
