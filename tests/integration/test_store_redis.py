"""What only a server can do to its clients: die, come back empty, stand still, refuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libs.store import Charge, Entry, Store, StoreError, open_store
from libs.store import redis as redis_module
from libs.store.base import OPERATIONS
from tests.support.redis_server import RedisServer
from tools.ports import free_port

# What a call may take at most, with room for a machine that is busy.
BOUND = redis_module.CALL_TIMEOUT + 15


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[Store]:
    store = open_store(server.url())
    yield store
    await store.close()


class Calls:
    """A StoreObserver."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def called(self, operation: str, seconds: float, *, failed: bool) -> None:
        assert seconds >= 0
        self.seen.append((operation, failed))


async def every_call(store: Store) -> list[BaseException | object]:
    """What each operation comes to, one after the other."""
    charge = [Charge("b", 1, limit=10)]
    calls = (
        lambda: store.put("key", "", ttl_seconds=60),
        lambda: store.get(["key"]),
        lambda: store.list(""),
        lambda: store.delete("key"),
        lambda: store.raise_counter("token"),
        lambda: store.read_counter("token"),
        lambda: store.spend(charge),
        lambda: store.settle(charge),
    )
    assert len(calls) == len(OPERATIONS)
    return [(await asyncio.gather(call(), return_exceptions=True))[0] for call in calls]


async def until_it_works(store: Store) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await store.list("")
            except StoreError:
                await asyncio.sleep(0.02)
            else:
                return


async def test_a_killed_server_is_a_store_error_of_every_call_and_a_restarted_one_is_an_empty_store(server: RedisServer, store: Store):
    await store.put("workers/a", "here", ttl_seconds=60)
    assert await store.raise_counter("token", at_least=6) == 7
    await store.spend([Charge("b", 10, limit=10)])
    server.kill()
    started = time.monotonic()
    assert [type(outcome) for outcome in await every_call(store)] == [StoreError] * len(OPERATIONS)
    assert time.monotonic() - started < BOUND
    server.start()
    await until_it_works(store)
    assert await store.list("") == []
    assert await store.raise_counter("token") == 1, "the counter is lost: workers refuse such a token, and leadership raises it"
    assert (await store.spend([Charge("b", 10, limit=10)])).taken
    assert await store.put("workers/a", "again", ttl_seconds=60)
    assert await store.list("") == [Entry("workers/a", "again")]


async def test_a_server_that_restarts_between_two_calls_costs_none(server: RedisServer, store: Store):
    await store.put("key", "", ttl_seconds=60)
    server.kill()
    server.start()
    assert await store.list("") == []


async def test_a_server_that_stands_still_is_a_store_error_in_bounded_time_for_a_hundred_calls(server: RedisServer, monkeypatch):
    monkeypatch.setattr(redis_module, "ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(redis_module, "CALL_TIMEOUT", 0.5)
    store = open_store(server.url())
    await until_it_works(store)
    await store.put("key", "here", ttl_seconds=600)
    server.pause()
    started = time.monotonic()
    outcomes = await asyncio.gather(*(store.get(["key"]) for _ in range(100)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreError}
    assert time.monotonic() - started < BOUND
    server.resume()
    await until_it_works(store)
    assert await store.get(["key"]) == ["here"]
    await store.close()


async def test_while_a_server_is_known_to_be_away_calls_fail_without_asking_it(server: RedisServer, store: Store, monkeypatch):
    monkeypatch.setattr(redis_module, "BACKOFF_FIRST", 600.0)
    monkeypatch.setattr(redis_module, "BACKOFF_MOST", 600.0)
    await store.list("")
    server.kill()
    with pytest.raises(StoreError):
        await store.list("")
    server.start()
    with pytest.raises(StoreError, match=rf"redis://127.0.0.1:{server.port}/0: cannot be reached: "):
        await store.list("")


async def test_a_call_that_its_caller_gives_up_takes_no_answer_of_another(server: RedisServer, store: Store):
    await store.put("key", "here", ttl_seconds=600)
    server.pause()
    calls = [asyncio.create_task(store.get(["key"])) for _ in range(40)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    server.resume()
    await until_it_works(store)
    assert await asyncio.gather(store.read_counter("token"), store.get(["other"]), store.get(["key"])) == [0, [None], ["here"]]


async def test_a_server_that_refuses_is_a_store_error_and_is_asked_again_at_once(server: RedisServer, store: Store):
    await store.put("key", "", ttl_seconds=60)
    connection = redis_module.Redis.from_url(server.url().partition("?")[0])
    await connection.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="maxmemory"):
        await store.put("key", "", ttl_seconds=60)
    await connection.config_set("maxmemory", "0")
    assert await store.put("key", "", ttl_seconds=60)
    await connection.aclose()


async def test_a_server_that_was_never_there_is_a_store_error_and_not_one_of_the_start():
    store = open_store(f"redis://127.0.0.1:{free_port()}/0")
    assert [type(outcome) for outcome in await every_call(store)] == [StoreError] * len(OPERATIONS)
    await store.close()


async def test_every_call_is_observed(server: RedisServer):
    calls = Calls()
    store = open_store(server.url(), calls)
    await every_call(store)
    assert calls.seen == [(operation, False) for operation in OPERATIONS]
    server.kill()
    calls.seen.clear()
    await every_call(store)
    assert calls.seen == [(operation, True) for operation in OPERATIONS]
    await store.close()


async def test_meshes_of_one_server_see_nothing_of_each_other(server: RedisServer):
    one, two = open_store(server.url("one")), open_store(server.url("two"))
    await one.put("key", "1", ttl_seconds=60)
    await one.raise_counter("token")
    assert await one.spend([Charge("b", 10, limit=10)])
    assert (await two.list(""), await two.read_counter("token")) == ([], 0)
    assert (await two.spend([Charge("b", 10, limit=10)])).taken
    await one.close()
    await two.close()


async def test_it_is_reached_through_a_unix_socket_too(server: RedisServer):
    store = open_store(f"unix://{server.socket}?db=1&prefix=x")
    await store.put("key", "here", ttl_seconds=60)
    assert await store.get(["key"]) == ["here"]
    await store.close()


async def test_nothing_that_ended_stays_behind_in_the_server(server: RedisServer, store: Store):
    await store.put("a", "", ttl_seconds=60)
    await store.put("b", "", ttl_seconds=0.01)
    await store.spend([Charge("full", 0, limit=10), Charge("short", 1, limit=10, period_seconds=0.01)])
    await store.delete("a")
    connection = redis_module.Redis.from_url(server.url().partition("?")[0], decode_responses=True)
    async with asyncio.timeout(20):
        while await store.list("") or await connection.keys("*"):
            await asyncio.sleep(0.01)
    await connection.aclose()
