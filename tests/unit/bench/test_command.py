"""Commands of bench end with a line, not with a traceback, and before they measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import executor, mesh_cost, perplexity, products
from bench.command import readable, run, whole, writable


@pytest.mark.parametrize("main", [executor.main, mesh_cost.main, perplexity.main])
def test_a_model_that_is_not_there_is_named_in_one_line(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(lambda: main([str(tmp_path / "nowhere")])) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-1].startswith("error: ")
    assert "nowhere" in told[-1]
    assert not any("Traceback" in line for line in told)


@pytest.mark.parametrize(
    ("main", "words", "named"),
    [
        (executor.main, ["model", "--threads", "0"], "--threads"),
        (executor.main, ["model", "--rounds", "0"], "--rounds"),
        (products.main, ["--rows", "0"], "0 is not 1 to"),
        (perplexity.main, ["model", "--window", "1"], "--window"),
        (perplexity.main, ["model", "--stride", "0"], "--stride"),
        (perplexity.main, ["model", "--window", "8", "--stride", "8"], "--stride"),
        (perplexity.main, ["model", "--text", "/dev/null"], "holds no text"),
        (perplexity.main, ["model", "--text", "/nowhere"], "No such file"),
        (perplexity.main, ["model", "--json", "/nowhere/report.json"], "No such file"),
        (mesh_cost.main, ["model", "--json", "/nowhere/report.json"], "No such file"),
        (mesh_cost.main, ["model", "--rounds", "0"], "--rounds"),
    ],
)
def test_an_argument_is_refused_by_its_name_before_anything_runs(
    main: Callable[[list[str]], int], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_an_interrupted_command_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]):
    def main() -> int:
        raise KeyboardInterrupt

    assert run(main) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistake_of_the_command_keeps_its_traceback():
    def main() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)


def test_a_report_that_was_there_is_kept_until_the_new_one_is_written(tmp_path: Path):
    (tmp_path / "old.json").write_text("[]")
    assert writable(str(tmp_path / "old.json")).read_text() == "[]"


def test_a_text_in_another_encoding_is_refused(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(argparse.ArgumentTypeError, match="not UTF-8"):
        readable(str(tmp_path / "text"))


def test_a_number_has_its_bounds():
    assert whole(1, 3)("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="4 is not 1 to 3"):
        whole(1, 3)("4")
