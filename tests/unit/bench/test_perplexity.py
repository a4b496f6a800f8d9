"""The measurement of perplexity: every token counted once, and the numbers those of the model's own logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bench import perplexity
from bench.perplexity import Scores, score, windows
from libs.errors import TokenloomError
from tests.unit.worker.helpers import load_engine


@given(st.integers(2, 300), st.integers(2, 60), st.data())
def test_every_token_but_the_first_is_counted_once_with_its_context(length: int, window: int, data: st.DataObject):
    stride = data.draw(st.integers(1, window - 1))
    counted = []
    for start, end, first in windows(length, window, stride):
        assert start < first < end <= min(start + window, length)
        assert first == 1 or first - start >= window - stride
        counted += range(first, end)
    assert counted == list(range(1, length))


def test_windows_of_the_whole_text_and_short_ones_tell_the_same_of_what_they_share(tiny_llama_dir: Path):
    engine = load_engine(tiny_llama_dir)
    tokens = [7, 9, 100, 42, 42, 3, 250, 11, 64, 5]
    whole, parts = score(engine, tokens, 10, 5), score(engine, tokens, 6, 3)
    assert len(whole.logprobs) == len(parts.logprobs) == 9
    assert parts.logprobs[:5] == whole.logprobs[:5]
    assert parts.logprobs[5:] != whole.logprobs[5:]
    assert math.log(whole.perplexity) == pytest.approx(-sum(whole.logprobs) / 9)


def test_agreement_is_the_share_of_equal_places():
    assert Scores([0.0] * 4, [1, 2, 3, 4]).agreement(Scores([0.0] * 4, [1, 2, 5, 4])) == 0.75


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 8), (8, 0), (10_000, 4)])
def test_windows_that_cannot_be_read_are_refused(tiny_llama_dir: Path, window: int, stride: int):
    with pytest.raises(TokenloomError, match="windows of 2 to 512 tokens"):
        score(load_engine(tiny_llama_dir), [3, 4, 5], window, stride)


def test_forms_are_compared_in_a_table(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.txt"
    text.write_text("the ring and the thing")
    arguments = [str(tiny_llama_dir), "--kernels", "reference", "--text", str(text), "--window", "8", "--stride", "4"]
    assert perplexity.main([*arguments, "--json", str(tmp_path / "reports.json")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " perplexity " in line]
    assert [line[0] for line in lines] == ["none", "int8", "int4"]
    reports = json.loads((tmp_path / "reports.json").read_text())
    assert reports[0]["ratio"] == reports[0]["agreement"] == 1.0
    assert len({report["numerics"] for report in reports}) == 3
    assert 0.9 < reports[1]["ratio"] < 1.1
