"""A comparison from the first server to the last, with small servers and loads that are none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.peers.plan import read, unfinished
from bench.peers.run import Comparison
from bench.peers.servers import Server
from bench.peers.weights import SharedWeights
from tests.unit.bench.peers.made import run

WEIGHTS = SharedWeights(Path("/w/Model"), Path("/w/endless/Model"), Path("/w/f32"), Path("/w/q8"), Path("/w/q4"), 1, {})
_ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
GOOD = Server("good", "Good", ("{python}", "-c", _ANSWERS, "{port}"), loads=("a", "b+busy"), exact=True)
BROKEN = Server("broken", "Broken", ("{python}", "-c", "raise SystemExit('no such flag')"), loads=("a",))
ABSENT = Server("absent", "Absent", ("/nowhere/server", "{port}"), loads=("a",))


class Measurements:
    """Takes the place of the commands that measure: notes them, and writes a load's result."""

    def __init__(self, others: Sequence[float] = ()) -> None:
        self.seeds: list[str] = []
        self.models: list[str] = []
        self.requests: list[str] = []
        self.servers: set[psutil.Process] = set()
        self._others = list(others)

    def __call__(self, _comparison: Comparison, command: list[str]) -> subprocess.CompletedProcess[str]:
        if command[2] == "bench.load":
            options = dict(zip(command[3::2], command[4::2], strict=False))
            self.seeds.append(options["--seed"])
            self.requests.append(options.get("--num-prompts", "all"))
            self.servers.add(psutil.Process(int(options["--server-pid"])))
            Path(options["--json"]).write_text(json.dumps(run(10.0, others=self._others.pop(0) if self._others else 0.0)))
        if command[2] == "bench.perplexity":
            Path(command[-1]).write_text(json.dumps([{"perplexity": 20.0, "ratio": 1.0}, {"perplexity": 21.0, "ratio": 1.05}]))
            self.models.append(command[3])
        return subprocess.CompletedProcess(command, 0, '{"read_gb_s": 30.0, "gemm_gflop_s": 100.0}', "")


def compare(out: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch, *servers: Server) -> None:
    monkeypatch.setattr(Comparison, "_run", lambda self, command, bound_s=0.0: measurements(self, command))
    monkeypatch.setattr("bench.peers.run._SETTLE_S", 0.3)
    Comparison(servers, WEIGHTS, None, 1, None, out, (), print).run()


def test_every_load_has_its_file_no_server_is_left_and_a_second_run_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measurements = Measurements()
    compare(tmp_path, measurements, monkeypatch, GOOD)
    place = tmp_path / "round-1" / "good"
    assert sorted(file.name for file in place.iterdir()) == ["a.json", "b+busy.json", "server.json", "server.log"]
    assert (read(place / "a.json") or {})["ceilings"]["after"]["read_gb_s"] == 30.0
    facts = read(place / "server.json") or {}
    assert facts["first_answer_s"] >= facts["ready_s"] > 0
    assert len(set(measurements.seeds)) == 2
    assert not any(process.is_running() for process in measurements.servers)
    compare(tmp_path, measurements, monkeypatch, GOOD)
    assert len(measurements.seeds) == 2


def test_a_disturbed_load_is_repeated_with_other_prompts_and_the_quieter_result_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measurements = Measurements(others=[0.9, 0.4])
    compare(tmp_path, measurements, monkeypatch, GOOD)
    kept = read(tmp_path / "round-1" / "good" / "a.json") or {}
    assert (kept["attempt"], kept["cpu"]["others_cores"]) == (1, 0.4)
    assert len(set(measurements.seeds)) == 3


def test_late_in_a_comparison_nothing_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measurements = Measurements(others=[0.9, 0.4])
    monkeypatch.setattr("bench.peers.run.REPEATS_UNTIL_S", -1.0)
    compare(tmp_path, measurements, monkeypatch, GOOD)
    assert (read(tmp_path / "round-1" / "good" / "a.json") or {})["attempt"] == 0
    assert len(measurements.seeds) == 2


def test_perplexity_of_a_quantised_server_is_measured_once_and_fewer_requests_are_sent_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measurements = Measurements()
    server = replace(GOOD, command=(*GOOD.command, "{float32}"), loads=("b", "a"), form="int8", requests={"a": 2})
    for _ in range(2):
        compare(tmp_path, measurements, monkeypatch, server)
    assert measurements.models == ["/w/Model"]
    assert measurements.requests == ["all", "2"]
    assert (read(tmp_path / "perplexity-good.json") or {})["ratio"] == 1.05


def test_loads_begin_some_time_after_a_server_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ages: list[float] = []
    monkeypatch.setattr(Comparison, "_load", lambda _self, _load, _server, process, _url: ages.append(process.age))
    compare(tmp_path, Measurements(), monkeypatch, GOOD)
    assert ages[0] >= (read(tmp_path / "round-1" / "good" / "server.json") or {})["ready_s"] + 0.3


def test_a_server_that_does_not_start_is_noted_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    compare(tmp_path, Measurements(), monkeypatch, BROKEN, ABSENT, GOOD)
    assert "no such flag" in (read(tmp_path / "round-1" / "broken" / "server.json") or {})["failed"]
    assert "cannot be run" in (read(tmp_path / "round-1" / "absent" / "server.json") or {})["failed"]
    assert "failed" not in (read(tmp_path / "round-1" / "good" / "server.json") or {"failed": ""})
    assert capsys.readouterr().out.count("DID NOT START") == 2


def test_a_load_in_company_that_does_not_end_is_a_result_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loads: list[float] = []

    def hangs(_self: Comparison, command: list[str], bound_s: float = 0.0) -> subprocess.CompletedProcess[str]:
        loads.append(bound_s)
        return subprocess.CompletedProcess(command, 124, "", "it took longer")

    monkeypatch.setattr(Comparison, "_run", hangs)
    monkeypatch.setattr("bench.peers.run._SETTLE_S", 0.0)
    server = Server("slow", "Slow", GOOD.command, loads=("b+busy",))
    for _ in range(2):
        Comparison([server], WEIGHTS, None, 1, None, tmp_path, (), print).run()
    assert unfinished(tmp_path / "round-1" / "slow" / "b+busy.json") == 150.0
    assert loads.count(150.0) == 1
