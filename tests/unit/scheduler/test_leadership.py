"""Fencing tokens and epochs: always higher, never twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from libs.store import SqliteStore, StoreError
from services.scheduler import leadership
from services.scheduler.leadership import Leadership


class BrokenStore(SqliteStore):
    """A store that is gone."""

    def __init__(self) -> None:
        pass

    def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        raise StoreError("unreachable")

    def read_counter(self, name: str) -> int:
        raise StoreError("unreachable")


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store.db")


def test_every_start_takes_a_higher_token(store: SqliteStore):
    tokens = [Leadership(store).token for _ in range(3)]
    assert tokens == sorted(set(tokens))


def test_a_refused_token_is_raised_above_what_the_worker_has_seen_and_later_starts_are_higher_still(store: SqliteStore):
    leader = Leadership(store)
    leader.raise_token(500)
    assert leader.token == 501
    leader.raise_token(3)
    assert leader.token == 502, "a token never falls"
    assert Leadership(store).token == 503


def test_without_a_store_the_clock_gives_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "time", SimpleNamespace(time=lambda: 1000.5))
    leader = Leadership(None)
    assert leader.token == 1000
    leader.raise_token(2000)
    assert leader.token > 1000


def test_with_a_broken_store_serving_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "time", SimpleNamespace(time=lambda: 1000.5))
    leader = Leadership(BrokenStore())
    before = leader.token
    leader.raise_token(2000)
    assert leader.token > before == 1000


def test_epochs_are_never_used_twice(store: SqliteStore):
    leader, other = Leadership(store), Leadership(store)
    epochs = [epoch for turn in (leader, other, leader) for _, epoch in [turn.next_epoch() for _ in range(100)]]
    assert len(set(epochs)) == len(epochs)


def test_the_epochs_of_a_leader_grow_even_when_its_token_is_raised(store: SqliteStore):
    leader = Leadership(store)
    first = leader.next_epoch()
    leader.raise_token(2000)
    second = leader.next_epoch()
    assert second > first
    assert second[0] == leader.token


def test_a_token_whose_epochs_are_used_up_is_followed_by_the_next(store: SqliteStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "_EPOCH_BITS", 3)
    leader = Leadership(store)
    epochs = [leader.next_epoch() for _ in range(20)]
    assert len({epoch for _, epoch in epochs}) == 20
    assert epochs == sorted(epochs)
    assert epochs[-1][0] > epochs[0][0]


@pytest.mark.parametrize("token", [1, 2**31, 2**33])
def test_an_epoch_fits_the_wire(token: int, store: SqliteStore):
    store.raise_counter("scheduler-fencing-token", at_least=token)
    assert 0 < Leadership(store).next_epoch()[1] < 2**64


def test_the_last_one_to_take_a_token_from_a_store_has_no_successor(store: SqliteStore):
    first = Leadership(store)
    assert not first.has_successor
    first.raise_token(500)
    assert not first.has_successor
    second = Leadership(store)
    assert (first.has_successor, second.has_successor) == (True, False)


def test_without_a_store_that_answers_nobody_knows_of_a_successor():
    assert not Leadership(None).has_successor
    assert not Leadership(BrokenStore()).has_successor
