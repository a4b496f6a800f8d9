"""The servers as data, and the words of their commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.__main__ import main
from bench.peers.environments import RECIPES
from bench.peers.gate import agreement
from bench.peers.run import Comparison
from bench.peers.servers import SERVERS, named
from bench.peers.targets import TARGETS
from bench.peers.weights import SharedWeights
from bench.workload import NAMED

WEIGHTS = SharedWeights(Path("/w/Model"), Path("/w/endless/Model"), Path("/w/f32"), Path("/w/q8"), Path("/w/q4"), 1, {})


class Words:
    """A tokenizer whose tokens are words of the alphabet."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in ids)


def test_every_word_in_braces_is_known_and_filled_in():
    comparison = Comparison(SERVERS, WEIGHTS, None, 1, None, Path("out"), (), print)
    for server in SERVERS:
        words = comparison.words(server, (*server.command, *server.variables.values()), 1234)
        assert "1234" in words
        assert not any("{" in word for word in words)


def test_what_is_named_elsewhere_exists():
    names = {server.name for server in SERVERS}
    assert {target.ours for target in TARGETS} | {target.peer for target in TARGETS} <= names
    assert {server.environment for server in SERVERS if server.environment} == {recipe.name for recipe in RECIPES}
    for target in TARGETS:
        assert all(target.load in server.loads for server in SERVERS if server.name in (target.ours, target.peer))
    assert {load.removesuffix("+busy") for server in SERVERS for load in server.loads} <= set(NAMED)


def test_servers_come_in_the_order_of_the_table_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]):
    assert [server.name for server in named(["vllm", "tokenloom"])] == ["tokenloom", "vllm"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--servers", "sglang"])
    assert ended.value.code == 2
    assert "no server is called sglang" in capsys.readouterr().err


def test_a_gate_passes_on_equal_tokens_and_says_where_others_differ():
    expected = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    found = agreement([[0, 1, 2], [0, 3, 2], [0, 1], "abc"], expected, Words())
    assert (found.equal, found.prompts, found.first, found.texts) == (2, 4, {"1": 1, "2": 2}, 1)
    assert not found.passed
    assert agreement([[0, 1, 2]], expected[:1], Words()).passed
    assert not agreement(["abc"], expected[:1], Words()).passed
