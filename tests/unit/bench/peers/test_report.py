"""Ratios against targets, and the page that shows them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Machine
from bench.peers.plan import Load, perplexity_file
from bench.peers.report import document, file_stem, markdown
from bench.peers.results import Results
from bench.peers.servers import Server
from bench.peers.targets import Target, reached
from bench.peers.weights import SharedWeights
from tests.unit.bench.peers.made import SMALL, put, put_facts, run

MACHINE = Machine("Some CPU (R) 9", 2, 16.0, "Linux", "3.11", {}, "abc", 0.0)
WEIGHTS = SharedWeights(Path("m"), Path("m"), Path("m"), Path("m"), Path("m"), 500_000_000, {"file": "sum"})
RISING = Target("rate", "us", "them", "a", "f", 1.5, 2.0)
FALLING = Target("time", "us", "them", "a", "f", 0.9, 0.5, rising=False)


def ratio_of(target: Target, ours: list[float | None], theirs: list[float | None]):
    figures = {"us": ours, "them": theirs}
    return reached(target, lambda server, _load, number: figures[server][number], range(len(ours)))


def test_a_ratio_is_of_medians_over_the_rounds_that_have_both_and_shows_its_spread():
    found = ratio_of(RISING, [10.0, 30.0, 20.0, None], [10.0, 10.0, 8.0, 1.0])
    assert (found.ratio, found.low, found.high, found.rounds) == (2.0, 1.0, 3.0, 3)


@pytest.mark.parametrize(
    ("target", "ours", "verdict"),
    [(RISING, 1.4, "NOT met"), (RISING, 1.5, "met"), (RISING, 2.0, "goal met"),
     (FALLING, 1.0, "NOT met"), (FALLING, 0.9, "met"), (FALLING, 0.5, "goal met"), (RISING, None, "not measured")],
)  # fmt: skip
def test_a_target_is_met_on_its_side_of_the_bound(target: Target, ours: float | None, verdict: str):
    assert ratio_of(target, [ours], [1.0]).verdict == verdict


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for number in (1, 2):
        for server, rate, beside in (("tokenloom", 60.0, 20.0), ("vllm", 30.0, 15.0)):
            put_facts(tmp_path, server, number)
            put(tmp_path, server, "a", number, run(rate, tpot=12.0))
            put(tmp_path, server, "b", number, run(4 * rate))
            put(tmp_path, server, "b+busy", number, run(4 * beside, others=1.0))
    return tmp_path


def results(out: Path) -> Results:
    return Results(out, SMALL, 2, WEIGHTS.bytes_float32)


def test_the_page_shows_each_target_with_its_verdict(out: Path):
    page = markdown(results(out), MACHINE, WEIGHTS)
    assert "| output tok/s, 1 stream | tokenloom | vllm | a | 1.5x | 1.6x | 2.00x (2.00 to 2.00) | 0.00 / 0.00 | goal met |" in page
    assert "| output tok/s, 1 stream | tokenloom | llamacpp | a | 1.2x | - | - | 0.00 / - | not measured |" in page
    assert "20 of 20" in page
    assert "tokenloom: serve {float32}" in page


def test_figures_of_a_server_that_fails_its_gate_do_not_count(out: Path):
    put_facts(out, "tokenloom", 2, gate={"equal": 19, "prompts": 20, "first": {"3": 7}})
    assert "goal met, but does not count: gate 19 of 20" in markdown(results(out), MACHINE, WEIGHTS)
    verdicts = {one["verdict"] for one in document(results(out), MACHINE, WEIGHTS)["targets"]}
    assert "goal met, but does not count: gate 19 of 20" in verdicts


@pytest.mark.parametrize(
    ("gate", "words"),
    [({"failed": "no connection"}, "20 of 20, in 1 of 2 rounds"), ({}, "20 of 20, in 1 of 2 rounds"),
     ({"equal": 20, "prompts": 20, "first": {}, "texts": 3}, "20 of 20, 3 as text alone")],
)  # fmt: skip
def test_every_round_must_have_passed_the_gate_by_ids(out: Path, gate: dict[str, Any], words: str):
    put_facts(out, "tokenloom", 2, gate=gate)
    assert results(out).gate(SMALL[0]) == (words, False)


def test_a_gate_that_never_answered_has_failed_and_one_never_asked_says_so(out: Path):
    for number in (1, 2):
        put_facts(out, "tokenloom", number, gate={"failed": "no connection"})
        put_facts(out, "vllm", number, gate={})
    assert results(out).gate(SMALL[0]) == ("failed", False)
    assert results(out).gate(SMALL[1]) == ("not asked", None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, ": no perplexity"), ({"ratio": 1.02}, ": perplexity 1.0200x, at most 1.01x"), ({"ratio": 1.01}, "")],
)
def test_figures_of_integers_count_with_their_perplexity_alone(out: Path, content: dict[str, Any] | None, reason: str):
    integers = Server("tokenloom-int8", "int8", ("serve", "{float32}"), loads=("a",), form="int8", most_perplexity=1.01)
    put(out, "tokenloom-int8", "a", 1, run(180.0))
    if content is not None:
        perplexity_file(out, "tokenloom-int8").write_text(json.dumps(content))
    found = Results(out, [*SMALL, integers], 1, WEIGHTS.bytes_float32)
    verdict = next(found.verdict(one) for one in found.ratios() if one.target.ours == "tokenloom-int8")
    assert verdict == ("met" + (f", but does not count{reason}" if reason else ""))
    shown = {one.label: one.verdict for one in found.conditions()}["perplexity of tokenloom-int8 over float32's"]
    assert shown == ("not measured" if content is None else "NOT met" if reason else "met")


def test_failed_requests_count_against_a_ratio(out: Path):
    put(out, "tokenloom", "a", 2, run(60.0, failed=1))
    assert "goal met, but does not count: 1 requests failed" in markdown(results(out), MACHINE, WEIGHTS)


def test_the_commands_on_the_page_are_those_that_ran(out: Path):
    put_facts(out, "tokenloom", 2, command=["serve", "{float32}", "--old"], variables={"X": "1"})
    page = markdown(results(out), MACHINE, WEIGHTS)
    assert "tokenloom: X=1 serve {float32} --old" in page
    assert "tokenloom: serve {float32}\n" in page


def test_time_per_token_is_held_against_reading_the_weights_at_the_greater_bandwidth_around_it(out: Path):
    assert results(out).floor_factor("tokenloom") == pytest.approx(12e-3 / (0.5 / 50))
    found = {one.label.split(" over")[0]: one for one in results(out).conditions()}["TPOT p50 at 1 stream"]
    assert found.verdict == "met"
    assert found.reached == "1.20x (GB/s before / after: 30.0 / 50.0, 30.0 / 50.0)"


def test_memory_with_a_touched_cache_is_stated_and_not_judged(out: Path):
    found = {one.label.split(" (")[0]: one for one in results(out).conditions()}["memory after all loads"]
    assert (found.reached, found.verdict) == ("1900.00 MB", "")


def test_a_slowdown_in_company_must_not_be_above_the_peers(out: Path):
    found = {one.label: one for one in results(out).conditions()}
    beside = found["slowdown beside a busy process, workload b, not above vllm's"]
    assert (beside.wanted, beside.reached, beside.verdict) == ("2.00x", "3.00x", "NOT met")
    assert found["slowdown beside a busy process, workload b, not above llamacpp's"].verdict == "not measured"


def test_a_load_in_company_that_had_not_ended_is_slower_by_its_seconds_at_least_and_not_missed(out: Path):
    before = results(out)
    put(out, "vllm", "b+busy", 1, {"failed": "it had not ended", "unfinished_s": 150.0})
    found = results(out)
    assert found.slowdown("vllm", "b") == statistics.median([15.0, *([before.slowdown("vllm", "b")] * (len(found.rounds) - 1))])
    assert "round 1, vllm b+busy: had not ended after 150 s" in found.marked()
    assert found.absent() == before.absent()


def test_doubtful_runs_are_named(out: Path):
    put(out, "vllm", "a", 1, run(30.0, others=0.4, failed=2))
    put(out, "vllm", "b", 2, {"failed": "no result"})
    marked = results(out).marked()
    assert any("round 1, vllm a: others used 0.40 cores" in line for line in marked)
    assert any("round 1, vllm a: 2 requests failed" in line for line in marked)
    assert "round 2, vllm: no result of b" in marked
    assert "round 1, llamacpp: no result of a" in marked
    assert not any("tokenloom b+busy" in line for line in marked)


def test_stolen_time_missing_usage_and_short_outputs_make_a_run_doubtful(out: Path):
    spoiled = run(30.0, steal=2.0)
    spoiled["statistics"] |= {"without_usage": 1, "short_outputs": 2}
    put(out, "vllm", "a", 1, spoiled)
    marked = [line.partition(": ")[2] for line in results(out).marked() if line.startswith("round 1, vllm a")]
    assert marked == ["the machine's host took 0.20 cores", "1 answers without usage are missing from the rates", "2 outputs ended early"]


def test_a_workload_that_was_not_asked_for_is_not_missed(out: Path):
    Load(1, "vllm", "b").file(out).unlink()
    assert "round 1, vllm: no result of b" in results(out).absent()
    assert Results(out, SMALL[:2], 2, 1, ["a"]).absent() == []


def test_the_document_for_machines_has_every_run_and_target(out: Path):
    found = document(results(out), MACHINE, WEIGHTS)
    assert len(found["runs"]) == 12
    assert {one["verdict"] for one in found["targets"]} >= {"goal met", "not measured"}
    assert file_stem(MACHINE).endswith("-peers-some-cpu-r-9-2-cores")


def test_peers_alone_have_a_page_too(out: Path):
    page = markdown(Results(out, SMALL[1:], 2, WEIGHTS.bytes_float32), MACHINE, WEIGHTS)
    assert "| seconds until /ready answers | at most 8 s | - | not measured |" in page
