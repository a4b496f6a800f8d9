"""Fencing tokens and epochs: always higher, never twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from libs.store import StoreError
from libs.store.sqlite import SqliteStore
from services.scheduler import leadership
from services.scheduler.leadership import Leadership


class BrokenStore(SqliteStore):
    """A store that is gone."""

    def __init__(self) -> None:
        pass

    async def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        raise StoreError("unreachable")

    async def read_counter(self, name: str) -> int:
        raise StoreError("unreachable")


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store.db")


async def test_every_start_takes_a_higher_token(store: SqliteStore):
    tokens = [(await Leadership.take(store)).token for _ in range(3)]
    assert tokens == sorted(set(tokens))


async def test_a_refused_token_is_raised_above_what_the_worker_has_seen_and_later_starts_are_higher_still(store: SqliteStore):
    leader = await Leadership.take(store)
    assert await leader.outbid(500)
    assert leader.token == 501
    assert await leader.outbid(501)
    assert leader.token == 502
    assert (await Leadership.take(store)).token == 503


async def test_a_token_that_is_above_what_the_worker_has_seen_stays(store: SqliteStore):
    leader = await Leadership.take(store)
    await leader.outbid(500)
    assert await leader.outbid(3)
    assert leader.token == 501, "it was raised since that worker refused"


async def test_workers_that_refuse_at_once_raise_it_once(store: SqliteStore):
    leader = await Leadership.take(store)
    assert await asyncio.gather(*(leader.outbid(seen) for seen in (500, 500, 400))) == [True] * 3
    assert (leader.token, await store.read_counter("scheduler-fencing-token")) == (501, 501)


async def test_a_store_that_came_back_empty_gives_a_token_that_workers_refuse_and_that_is_raised(store: SqliteStore, tmp_path: Path):
    await store.raise_counter("scheduler-fencing-token", at_least=41)
    seen = (await Leadership.take(store)).token
    later = await Leadership.take(SqliteStore(tmp_path / "empty.db"))
    assert later.token < seen
    assert await later.outbid(seen)
    assert later.token > seen


async def test_without_a_store_the_clock_gives_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "time", SimpleNamespace(time=lambda: 1000.5))
    leader = await Leadership.take(None)
    assert leader.token == 1000
    assert await leader.outbid(2000)
    assert leader.token > 2000


async def test_with_a_broken_store_serving_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "time", SimpleNamespace(time=lambda: 1000.5))
    leader = await Leadership.take(BrokenStore())
    assert leader.token == 1000
    assert await leader.outbid(2000), "nobody knows of a successor"
    assert leader.token > 2000


async def test_epochs_are_never_used_twice(store: SqliteStore):
    leader, other = await Leadership.take(store), await Leadership.take(store)
    epochs = [(await turn.next_epoch())[1] for turn in (leader, other, leader) for _ in range(100)]
    assert len(set(epochs)) == len(epochs)


async def test_the_epochs_of_a_leader_grow_even_when_its_token_is_raised(store: SqliteStore):
    leader = await Leadership.take(store)
    first = await leader.next_epoch()
    await leader.outbid(2000)
    second = await leader.next_epoch()
    assert second > first
    assert second[0] == leader.token


async def test_a_token_whose_epochs_are_used_up_is_followed_by_the_next(store: SqliteStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "_EPOCH_BITS", 3)
    leader = await Leadership.take(store)
    epochs = [await leader.next_epoch() for _ in range(20)]
    assert len({epoch for _, epoch in epochs}) == 20
    assert epochs == sorted(epochs)
    assert epochs[-1][0] > epochs[0][0]


async def test_links_that_attach_at_once_get_epochs_of_their_own(store: SqliteStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leadership, "_EPOCH_BITS", 3)
    leader = await Leadership.take(store)
    epochs = await asyncio.gather(*(leader.next_epoch() for _ in range(50)))
    assert len({epoch for _, epoch in epochs}) == 50


@pytest.mark.parametrize("token", [1, 2**31, 2**33])
async def test_an_epoch_fits_the_wire(token: int, store: SqliteStore):
    await store.raise_counter("scheduler-fencing-token", at_least=token)
    assert 0 < (await (await Leadership.take(store)).next_epoch())[1] < 2**64


async def test_a_leader_with_a_successor_takes_no_token(store: SqliteStore):
    first = await Leadership.take(store)
    assert await first.outbid(500)
    token, second = first.token, await Leadership.take(store)
    assert not await first.outbid(second.token)
    assert first.token == token
    assert await second.outbid(second.token)
