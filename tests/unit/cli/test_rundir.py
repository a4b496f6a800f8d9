import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cli import rundir
from cli.rundir import RunDirectory, candidates, locate
from libs.errors import ErrorCode, TokenloomError


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_one_directory_per_port_private_to_the_user(base):
    held = RunDirectory.claim(8123)
    assert held.path == base / "8123"
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
    assert held.socket("worker") == f"unix:{base}/8123/worker.sock"
    held.release()


def test_a_second_mesh_on_the_port_is_refused_and_told_who_holds_it(base):
    held = RunDirectory.claim(8123)
    with pytest.raises(TokenloomError, match=rf"already serving on port 8123 .*pid {os.getpid()}\)"):
        RunDirectory.claim(8123)
    RunDirectory.claim(8124).release()
    held.release()
    RunDirectory.claim(8123).release()


def test_what_a_mesh_that_died_has_left_is_removed_but_its_traces_and_its_store_stay(base):
    directory = base / "8123"
    directory.mkdir(parents=True, mode=0o700)
    for name in ("worker.sock", "store.db", "store.db-wal", "traces.db"):
        (directory / name).write_text("old")
    held = RunDirectory.claim(8123)
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "store.db", "store.db-wal", "traces.db"]
    held.release()


def test_releasing_leaves_no_socket_behind(base):
    held = RunDirectory.claim(8123)
    (held.path / "worker.sock").write_text("")
    held.release()
    assert not list(held.path.glob("*.sock"))


def test_a_lock_does_not_outlive_a_killed_process(base):
    code = "import os; from cli.rundir import RunDirectory; RunDirectory.claim(8123); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    RunDirectory.claim(8123).release()


def test_a_directory_that_others_can_read_is_closed_to_them(base):
    (base / "8123").mkdir(parents=True, mode=0o755)
    held = RunDirectory.claim(8123)
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
    held.release()


def test_a_link_in_the_place_of_the_directory_is_refused(base, tmp_path):
    base.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (base / "8123").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokenloomError, match="not a directory of this user"):
        RunDirectory.claim(8123)


def test_a_directory_of_someone_else_is_refused(base, monkeypatch):
    (base / "8123").mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(rundir.os, "getuid", lambda: 12345)
    with pytest.raises(TokenloomError, match="not a directory of this user"):
        RunDirectory.claim(8123)


def test_a_path_that_is_too_long_for_a_socket_is_refused_by_its_variables_name(monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", "/tmp/" + "x" * 100)
    with pytest.raises(TokenloomError, match="TOKENLOOM_RUN_DIR=") as refused:
        locate(8000)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_a_long_runtime_directory_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.delenv("TOKENLOOM_RUN_DIR", raising=False)
    runtime = tmp_path / ("x" * 90)
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert locate(8000) == Path(f"/tmp/tokenloom-{os.getuid()}/8000")


def test_a_shell_without_the_runtime_variable_still_finds_the_other_place(monkeypatch, tmp_path):
    monkeypatch.delenv("TOKENLOOM_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert candidates(8000) == [Path("/tmp/tokenloom/8000"), Path(f"/tmp/tokenloom-{os.getuid()}/8000")]


@pytest.mark.parametrize("port", [1, 65535])
def test_every_socket_path_fits_into_the_kernels_bound(monkeypatch, port):
    monkeypatch.delenv("TOKENLOOM_RUN_DIR", raising=False)
    for directory in candidates(port):
        assert len(os.fsencode(directory / "tokenizer.sock")) <= rundir.MAX_SOCKET_PATH_BYTES
