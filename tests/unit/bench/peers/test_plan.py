"""The order of a comparison, and what is left of one that was interrupted."""

from __future__ import annotations

from pathlib import Path

from bench.peers.plan import Load, disturbed, loads, missing, order
from bench.peers.servers import SERVERS
from tests.unit.bench.peers.made import SMALL, put, put_facts, run


def test_every_second_round_goes_backwards_and_each_keeps_those_that_are_in_it():
    names = [[server.name for server in order(SMALL, number)] for number in (1, 2, 3)]
    assert names == [["tokenloom", "vllm", "llamacpp"], ["vllm", "tokenloom"], ["vllm", "tokenloom"]]


def test_a_workload_that_was_asked_for_comes_with_its_run_in_company():
    assert [load.name for load in loads(SMALL[0], 1, ["b"])] == ["b", "b+busy"]


def test_no_two_loads_that_one_server_sees_have_the_same_seed():
    names = {name for server in SERVERS for name in server.loads}
    seeds = [Load(number, "x", name).seed(attempt) for number in (1, 2, 3) for name in names for attempt in (0, 1)]
    assert len(set(seeds)) == len(seeds)


def test_a_comparison_goes_on_with_what_has_no_result_yet(tmp_path: Path):
    assert len(missing(SMALL[0], 1, None, tmp_path, gated=False)) == 3
    put_facts(tmp_path, "tokenloom", 1)
    put(tmp_path, "tokenloom", "a", 1, run(1.0))
    put(tmp_path, "tokenloom", "b", 1, {"failed": "no result"})
    Load(1, "tokenloom", "b+busy").file(tmp_path).write_text('{"statistics": {')
    assert [load.name for load in missing(SMALL[0], 1, None, tmp_path, gated=False)] == ["b", "b+busy"]
    put(tmp_path, "tokenloom", "b", 1, run(1.0))
    put(tmp_path, "tokenloom", "b+busy", 1, run(1.0))
    assert missing(SMALL[0], 1, None, tmp_path, gated=False) == []


def test_a_server_of_which_nothing_is_known_runs_again_with_what_is_left_or_else_with_all(tmp_path: Path):
    put(tmp_path, "tokenloom", "a", 1, run(1.0))
    assert [load.name for load in missing(SMALL[0], 1, None, tmp_path, gated=False)] == ["b", "b+busy"]
    put(tmp_path, "tokenloom", "b", 1, run(1.0))
    put(tmp_path, "tokenloom", "b+busy", 1, run(1.0))
    assert len(missing(SMALL[0], 1, None, tmp_path, gated=False)) == 3
    put_facts(tmp_path, "tokenloom", 1, failed="it ended")
    assert len(missing(SMALL[0], 1, None, tmp_path, gated=False)) == 3


def test_a_server_whose_gate_was_not_answered_runs_again_where_the_gate_counts(tmp_path: Path):
    for name in SMALL[0].loads:
        put(tmp_path, "tokenloom", name, 1, run(1.0))
    put_facts(tmp_path, "tokenloom", 1, gate={"failed": "no connection"})
    assert len(missing(SMALL[0], 1, None, tmp_path, gated=True)) == 3
    assert missing(SMALL[0], 1, None, tmp_path, gated=False) == []
    put_facts(tmp_path, "tokenloom", 1)
    assert missing(SMALL[0], 1, None, tmp_path, gated=True) == []


def test_a_load_is_disturbed_when_others_used_over_a_twentieth_of_the_machine():
    assert not disturbed(run(1.0, others=0.09))
    assert disturbed(run(1.0, others=0.11))
