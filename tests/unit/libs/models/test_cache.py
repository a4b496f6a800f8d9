"""Cache entries appear whole or not at all, and are made once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libs.models.cache import default_cache_dir, ensure_entry, link_or_copy


def test_one_of_many_makes_an_entry_and_the_others_wait_for_it(tmp_path):
    made, together = [], threading.Barrier(4)

    def make(staging):
        made.append(staging)
        (staging / "part").write_text("whole")

    def want(_):
        together.wait()
        return (ensure_entry(tmp_path / "cache" / "entry", make) / "part").read_text()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(want, range(4))) == ["whole"] * 4
    assert len(made) == 1


def test_a_maker_that_fails_leaves_no_entry_and_the_next_one_tries_again(tmp_path):
    def fail(staging):
        (staging / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_entry(tmp_path / "entry", fail)
    assert not (tmp_path / "entry").exists()
    assert ensure_entry(tmp_path / "entry", lambda staging: (staging / "file").touch()) == tmp_path / "entry"
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["file"]


def test_what_a_dead_maker_left_is_removed(tmp_path):
    abandoned = tmp_path / ".entry.new-dead"
    abandoned.mkdir()
    ensure_entry(tmp_path / "entry", lambda _staging: None)
    assert not abandoned.exists()


def test_an_entry_that_is_not_intact_is_made_again(tmp_path):
    made = []

    def make(staging):
        made.append(staging)
        (staging / "part").write_text("whole")

    def intact(entry):
        return (entry / "part").read_text() == "whole"

    entry = ensure_entry(tmp_path / "entry", make, intact)
    (entry / "part").write_text("who")
    for _ in range(2):
        assert (ensure_entry(tmp_path / "entry", make, intact) / "part").read_text() == "whole"
    assert len(made) == 2


def test_linking_falls_back_to_copying(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("weights")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").stat().st_ino == (tmp_path / "a").stat().st_ino

    def refuse(*_args):
        raise OSError("cross-device link")

    monkeypatch.setattr("os.link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "weights"


def test_the_cache_lies_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("TOKENLOOM_CACHE", "/x")
    assert default_cache_dir() == Path("/x")
    monkeypatch.delenv("TOKENLOOM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/y")
    assert default_cache_dir() == Path("/y/tokenloom")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "tokenloom"
