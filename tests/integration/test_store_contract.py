"""The contract of Store, for each that keeps it. A further one joins by adding how it is opened to `STORES`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.store import Balance, Charge, Entry, Store, When
from libs.store import redis as redis_module
from libs.store.local import LocalBuckets
from libs.store.redis import RedisStore
from libs.store.sqlite import SqliteStore
from tests.support.redis_server import RedisServer


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Place:
    """Shared state that further clients of it open, as other processes would."""

    kind: str
    directory: Path
    redis: RedisServer | None
    space: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex}")

    def client(self, clock: Clock | None = None) -> Store:
        if self.redis is not None:
            return RedisStore(self.redis.url().partition("?")[0], name="redis", prefix=self.space, clock=clock)
        path = self.directory / f"{self.space}.db"
        return SqliteStore(path, clock=clock) if clock is not None else SqliteStore(path)

    @asynccontextmanager
    async def opened(self, clock: Clock | None = None) -> AsyncIterator[Store]:
        client = self.client(clock)
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy for a second is no store that is away; one that is dead refuses at once."""
    for name in ("CONNECT_TIMEOUT", "ANSWER_TIMEOUT", "POOL_TIMEOUT", "CALL_TIMEOUT"):
        monkeypatch.setattr(redis_module, name, 60.0)


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    redis = request.getfixturevalue("redis_server") if request.param == "redis" else None
    return Place(request.param, tmp_path, redis)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    async with place.opened() as client:
        yield client


@pytest.fixture
async def other(place: Place) -> AsyncIterator[Store]:
    """A second client of `store`'s."""
    async with place.opened() as client:
        yield client


async def test_what_one_client_puts_another_lists_and_gets(store: Store, other: Store):
    assert await store.put("workers/a", "here", ttl_seconds=60)
    assert await other.list("workers/") == [Entry("workers/a", "here")]
    assert await other.get(["workers/b", "workers/a", "workers/b"]) == [None, "here", None]
    assert await other.get([]) == []


async def test_entries_are_listed_by_key_and_by_prefix_alone(store: Store):
    for key in ("workers/b", "workers/a", "worker", "workers0", "other/a"):
        await store.put(key, key, ttl_seconds=60)
    assert [entry.key for entry in await store.list("workers/")] == ["workers/a", "workers/b"]
    assert [entry.key for entry in await store.list("")] == ["other/a", "worker", "workers/a", "workers/b", "workers0"]
    assert await store.list("workers/c") == []


@pytest.mark.parametrize("odd", ["%", "_", "*", "'", "[", "(", "\\", ":", " ", "\n", "é", "\U0001f9f5", "\U0010ffff"])
async def test_keys_and_prefixes_are_taken_literally(store: Store, odd: str):
    await store.put(f"a{odd}b", f"1{odd}", ttl_seconds=60)
    await store.put("axb", "2", ttl_seconds=60)
    assert await store.list(f"a{odd}") == [Entry(f"a{odd}b", f"1{odd}")]
    assert await store.get([f"a{odd}b"]) == [f"1{odd}"]
    await store.delete(f"a{odd}b")
    assert [entry.key for entry in await store.list("a")] == ["axb"]


async def test_keys_are_in_the_order_of_their_bytes(store: Store):
    keys = ["a", "a/b", "aB", "ab", "aé", "a\ue000", "a\U0001f9f5"]
    for key in keys:
        await store.put(key, "", ttl_seconds=None)
    assert [entry.key for entry in await store.list("a")] == sorted(keys, key=str.encode)


async def test_putting_again_replaces_value_and_lease(store: Store):
    await store.put("key", "old", ttl_seconds=None)
    await store.put("key", "new", ttl_seconds=60)
    assert await store.list("key") == [Entry("key", "new")]
    await store.put("key", "gone", ttl_seconds=-1)
    assert (await store.list("key"), await store.get(["key"])) == ([], [None])


async def test_an_entry_whose_lease_ran_out_is_gone_until_it_is_renewed(store: Store, other: Store):
    await store.put("key", "1", ttl_seconds=0.05)
    await store.put("stays", "", ttl_seconds=None)
    async with asyncio.timeout(20):
        while await other.get(["key"]) != [None]:
            await asyncio.sleep(0.01)
    assert [entry.key for entry in await other.list("")] == ["stays"]
    await store.put("key", "2", ttl_seconds=60)
    assert [entry.key for entry in await other.list("")] == ["key", "stays"]


async def test_a_renewal_lengthens_the_lease(store: Store):
    await store.put("key", "", ttl_seconds=0.05)
    await store.put("key", "", ttl_seconds=60)
    await asyncio.sleep(0.1)
    assert await store.get(["key"]) == [""]


async def test_deleting_twice_is_deleting_once(store: Store):
    await store.put("key", "", ttl_seconds=60)
    await store.delete("key")
    await store.delete("key")
    assert await store.list("") == []


async def test_only_one_of_many_claims_an_absent_key(place: Place):
    async with place.opened() as one, place.opened() as two:
        claims = [client.put("name", str(n), ttl_seconds=None, when=When.ABSENT) for n in range(10) for client in (one, two)]
        assert sorted(await asyncio.gather(*claims)) == [False] * 19 + [True]
        [kept] = await one.get(["name"])
        assert not await two.put("name", "other", ttl_seconds=None, when=When.ABSENT)
        assert await one.get(["name"]) == [kept]


async def test_what_is_not_there_is_not_replaced(store: Store):
    assert not await store.put("key", "1", ttl_seconds=None, when=When.PRESENT)
    assert await store.list("") == []
    await store.put("key", "1", ttl_seconds=None)
    assert await store.put("key", "2", ttl_seconds=None, when=When.PRESENT)
    assert await store.get(["key"]) == ["2"]


async def test_a_lease_that_ran_out_leaves_the_key_absent(store: Store):
    await store.put("key", "1", ttl_seconds=0)
    assert not await store.put("key", "2", ttl_seconds=60, when=When.PRESENT)
    assert await store.put("key", "3", ttl_seconds=60, when=When.ABSENT)
    assert await store.get(["key"]) == ["3"]


async def test_a_counter_passes_what_its_caller_has_seen_and_never_falls(store: Store, other: Store):
    assert await store.read_counter("token") == 0
    assert await store.raise_counter("token", at_least=41) == 42
    assert await other.raise_counter("token", at_least=7) == 43
    assert [await store.read_counter("token"), await other.read_counter("token")] == [43, 43]
    assert await store.raise_counter("token", at_least=2**40) == 2**40 + 1
    assert await store.raise_counter("another") == 1


async def test_two_clients_never_get_the_same_token(place: Place):
    async with place.opened() as one, place.opened() as two:
        tokens = await asyncio.gather(*(client.raise_counter("token") for _ in range(20) for client in (one, two)))
    assert sorted(tokens) == list(range(1, 41))


async def test_a_thousand_calls_at_once_all_get_their_answer(store: Store):
    await store.put("key", "here", ttl_seconds=60)
    answers = await asyncio.gather(*(store.get(["key"]) for _ in range(1000)))
    assert answers == [["here"]] * 1000


async def test_a_bucket_gives_what_it_holds_and_says_when_there_is_more(place: Place):
    clock = Clock()
    charge = Charge("requests", 1, limit=3, period_seconds=60)
    async with place.opened(clock) as store, place.opened(clock) as other:
        taken = [await client.spend([charge]) for client in (store, other, store)]
        assert [one.balances[0].remaining for one in taken] == [2, 1, 0]
        refused = await other.spend([charge])
        assert (refused.taken, refused.balances) == (False, (Balance(0, 60.0, 20.0),))
        clock.now += 20
        assert (await store.spend([charge])).taken
        clock.now += 3600
        assert (await store.spend([charge])).balances == (Balance(2, 20.0, 0.0),)


async def test_charges_are_taken_together_or_not_at_all(place: Place):
    requests, tokens = Charge("requests", 1, limit=10), Charge("tokens", 80, limit=100)
    async with place.opened(Clock()) as store:
        assert (await store.spend([requests, tokens])).taken
        refused = await store.spend([requests, tokens])
        assert not refused.taken
        assert [balance.remaining for balance in refused.balances] == [9, 20]
        assert [balance.retry_seconds for balance in refused.balances] == [0.0, pytest.approx(36.0)]


async def test_more_than_the_limit_fits_a_full_bucket_and_the_rest_is_a_debt(place: Place):
    clock, huge = Clock(), Charge("tokens", 250, limit=100)
    async with place.opened(clock) as store:
        assert (await store.spend([huge])).balances == (Balance(0, 60.0, 0.0),)
        await store.settle([Charge("tokens", 150, limit=100)])
        refused = await store.spend([Charge("tokens", 1, limit=100)])
        assert (refused.taken, refused.balances[0].reset_seconds) == (False, pytest.approx(150.0))
        clock.now += 90.6
        assert (await store.spend([Charge("tokens", 1, limit=100)])).taken


async def test_what_is_given_back_never_fills_a_bucket_beyond_its_limit(place: Place):
    async with place.opened(Clock()) as store:
        await store.spend([Charge("tokens", 40, limit=100)])
        assert (await store.settle([Charge("tokens", -10, limit=100)])).balances[0].remaining == 70
        assert (await store.settle([Charge("tokens", -500, limit=100)])).balances[0] == Balance(100, 0.0, 0.0)


async def test_a_changed_limit_keeps_the_share_that_is_used(place: Place):
    async with place.opened(Clock()) as store:
        await store.spend([Charge("tokens", 50, limit=100)])
        assert (await store.spend([Charge("tokens", 0, limit=1000)])).balances[0].remaining == 500


async def test_by_the_stores_own_clock_a_bucket_fills(store: Store):
    charge = Charge("requests", 100, limit=100, period_seconds=0.2)
    assert (await store.spend([charge])).taken
    async with asyncio.timeout(20):
        while not (again := await store.spend([charge])).taken:
            assert 0 < again.balances[0].retry_seconds <= 0.2
            await asyncio.sleep(again.balances[0].retry_seconds)


async def test_two_clients_together_never_spend_more_than_there_is(place: Place):
    clock = Clock()
    async with place.opened(clock) as one, place.opened(clock) as two:
        spent = await asyncio.gather(*(client.spend([Charge("b", 7, limit=100)]) for _ in range(15) for client in (one, two)))
    assert sum(one.taken for one in spent) == 14


_COSTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(-300, 300), min_size=1)
_STEPS = st.lists(st.tuples(st.sampled_from(["spend", "settle"]), _COSTS, st.floats(0, 90)), max_size=12)
_LIMITS = {"a": (100, 60.0), "b": (7, 1.0), "c": (1_000_000, 60.0)}


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_every_store_reckons_as_the_buckets_of_one_process_do(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, steps: list[tuple[str, dict[str, int], float]]
):
    place = Place(kind, tmp_path, request.getfixturevalue("redis_server") if kind == "redis" else None)
    asyncio.run(_same_as_local(place, steps))


async def _same_as_local(place: Place, steps: list[tuple[str, dict[str, int], float]]) -> None:
    clock = Clock()
    local = LocalBuckets(clock)
    async with place.opened(clock) as store:
        for operation, costs, seconds in steps:
            charges = [
                Charge(name, abs(cost) if operation == "spend" else cost, limit=_LIMITS[name][0], period_seconds=_LIMITS[name][1])
                for name, cost in costs.items()
            ]
            mine, theirs = getattr(local, operation)(charges), await getattr(store, operation)(charges)
            assert mine.taken == theirs.taken
            for expected, found in zip(mine.balances, theirs.balances, strict=True):
                assert found.remaining == pytest.approx(expected.remaining, abs=1)
                assert found.reset_seconds == pytest.approx(expected.reset_seconds, abs=1e-4)
                assert found.retry_seconds == pytest.approx(expected.retry_seconds, abs=1e-4)
            clock.now += seconds
