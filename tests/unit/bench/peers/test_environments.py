"""The peers' environments: stamped when they are whole, with their log named when they are not."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest

from bench.peers import environments
from bench.peers.__main__ import main
from bench.peers.environments import InstallError, Recipe, install, instructions, stamp
from services.worker.kernels.cpu.build import ensure_library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "RECIPES", (Recipe("small", ("nothing-of-this-name==1",), "a test"),))
    return tmp_path


def test_an_environment_of_other_pins_or_without_a_stamp_is_not_there(cache: Path):
    assert stamp("small") is None
    file = cache / "peers" / "small" / "peer.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"pins": ["nothing-of-this-name==1"], "versions": {"x": "1"}, "variables": {}}))
    assert stamp("small") == {"x": "1"}
    file.write_text(json.dumps({"pins": ["nothing-of-this-name==1"], "versions": {"x": "1"}, "variables": {"CMAKE_ARGS": "-O0"}}))
    assert stamp("small") is None
    file.write_text(json.dumps({"pins": ["nothing-of-this-name==2"], "versions": {"x": "1"}, "variables": {}}))
    assert stamp("small") is None


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
def test_the_instruction_set_of_a_library_is_read_off_its_assembly():
    shown = instructions(ensure_library())
    wide, narrow = (int(part.split()[0]) for part in shown.split(", "))
    assert shown == f"{wide} lines with zmm, {narrow} lines with ymm"
    if platform.machine() == "x86_64":
        assert min(wide, narrow) > 100
    assert instructions(Path(__file__)) == "0 lines with zmm, 0 lines with ymm"


def test_a_llama_without_this_machines_instructions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho version: 1\n")
    server.chmod(0o755)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(environments, "_output", lambda _command: str(server))
    monkeypatch.setattr(environments, "instructions", lambda _library: "0 lines with zmm, 9 lines with ymm")
    monkeypatch.setattr(environments, "_cpu_flags", lambda: ["avx2"])
    assert environments._finish_llama(tmp_path, tmp_path)["llama.cpp"] == "version: 1"
    monkeypatch.setattr(environments, "_cpu_flags", lambda: ["avx2", "avx512f"])
    with pytest.raises(InstallError, match="not compiled for this machine"):
        environments._finish_llama(tmp_path, tmp_path)


def test_a_step_that_fails_names_its_log_and_leaves_no_stamp(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "_PIP", ("-c", "raise SystemExit('no such distribution')"))
    monkeypatch.setattr(environments, "_python", lambda _env: environments.sys.executable)
    with pytest.raises(InstallError, match=r"small-install\.log, its end:\nno such distribution"):
        install(None, print)
    assert stamp("small") is None


@pytest.mark.usefixtures("cache")
def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["install", "sglang"])
    assert ended.value.code == 2
    assert "there is no peer sglang; there are small" in capsys.readouterr().err
