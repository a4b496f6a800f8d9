"""Who is let in: with a store that answers, one that does not, and one that has changed its mind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from libs.api_keys import ApiKey, KeyBook, Limits
from libs.clock import ManualClock
from libs.errors import ErrorCode, TokenloomError
from libs.store import StoreError
from libs.store.sqlite import SqliteStore
from services.gateway import keys
from services.gateway.keys import KeyRing


class Book(KeyBook):
    """Counts what it is asked, and fails when told to."""

    away = False
    asked = 0

    async def find(self, digests: Sequence[str]) -> list[ApiKey | None]:
        self.asked += 1
        if self.away:
            raise StoreError("away")
        return await super().find(digests)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(SqliteStore(tmp_path / "store.db"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ring(book: Book, clock: ManualClock) -> KeyRing:
    return KeyRing(["static-one", "static-two"], book, clock)


async def refused(ring: KeyRing, key: str) -> ErrorCode:
    with pytest.raises(TokenloomError) as error:
        await ring.check(key.encode())
    return error.value.code


async def refresh(ring: KeyRing, book: Book) -> None:
    await ring._refresh(book)


async def test_static_keys_are_taken_without_a_store_call(ring: KeyRing, book: Book):
    assert [await ring.check(b"static-one"), await ring.check(b"static-two")] == [None, None]
    assert book.asked == 0


@pytest.mark.parametrize("given", ["", "static-on", "static-one ", "STATIC-ONE", "x"])
async def test_without_a_store_all_others_are_refused(clock: ManualClock, given: str):
    assert await refused(KeyRing(["static-one"], None, clock), given) is ErrorCode.UNAUTHORIZED


async def test_no_key_at_all_is_never_a_key(clock: ManualClock):
    assert await refused(KeyRing([""], None, clock), "") is ErrorCode.UNAUTHORIZED


async def test_a_stored_key_is_looked_up_once(ring: KeyRing, book: Book):
    key = await book.create("alice", Limits(3, 0), 0)
    found = [await ring.check(key.encode()) for _ in range(5)]
    assert {(one.name, one.limits) for one in found if one is not None} == {("alice", Limits(3, 0))}
    assert book.asked == 1


async def test_a_wrong_key_is_asked_for_once_in_two_seconds(ring: KeyRing, book: Book, clock: ManualClock):
    assert [await refused(ring, "wrong") for _ in range(3)] == [ErrorCode.UNAUTHORIZED] * 3
    assert book.asked == 1
    clock.advance(2.1)
    await refused(ring, "wrong")
    assert book.asked == 2


async def test_no_key_is_no_store_call(ring: KeyRing, book: Book):
    assert await refused(ring, "") is ErrorCode.UNAUTHORIZED
    assert book.asked == 0


async def test_a_revoked_key_is_refused_after_the_next_refresh(ring: KeyRing, book: Book):
    key = await book.create("alice", Limits(), 0)
    await ring.check(key.encode())
    await book.revoke("alice")
    await refresh(ring, book)
    assert await refused(ring, key) is ErrorCode.UNAUTHORIZED


async def test_new_limits_count_after_the_next_refresh(ring: KeyRing, book: Book):
    key = await book.create("alice", Limits(), 0)
    await ring.check(key.encode())
    await book.set_limits("alice", Limits(7, 0))
    await refresh(ring, book)
    found = await ring.check(key.encode())
    assert found is not None
    assert found.limits == Limits(7, 0)


async def test_while_the_store_is_away_known_keys_go_on_for_a_while_and_unknown_ones_get_a_503(
    ring: KeyRing, book: Book, clock: ManualClock
):
    known, unknown = await book.create("alice", Limits(), 0), await book.create("bob", Limits(), 0)
    await ring.check(known.encode())
    book.away = True
    await refresh(ring, book)
    assert await ring.check(known.encode()) is not None
    assert [await refused(ring, key) for key in (unknown, "wrong")] == [ErrorCode.STORE_UNAVAILABLE] * 2
    assert await ring.check(b"static-one") is None
    clock.advance(keys.GRACE_SECONDS + 1)
    assert await refused(ring, known) is ErrorCode.STORE_UNAVAILABLE
    book.away = False
    assert await ring.check(known.encode()) is not None
    assert await ring.check(unknown.encode()) is not None


async def test_a_key_that_was_refused_is_not_let_in_because_the_store_went_away(ring: KeyRing, book: Book, clock: ManualClock):
    await refused(ring, "wrong")
    book.away = True
    clock.advance(60)
    assert await refused(ring, "wrong") is ErrorCode.STORE_UNAVAILABLE


async def test_a_key_that_nobody_uses_is_forgotten(ring: KeyRing, book: Book, clock: ManualClock):
    key = await book.create("alice", Limits(), 0)
    await ring.check(key.encode())
    clock.advance(keys.IDLE_SECONDS + 1)
    await refresh(ring, book)
    asked = book.asked
    await refresh(ring, book)
    assert book.asked == asked, "there is nobody to ask for"
    assert await ring.check(key.encode()) is not None


async def test_guesses_do_not_pile_up(ring: KeyRing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keys, "_REFUSED_MOST", 10)
    for number in range(30):
        await refused(ring, f"guess-{number}")
    assert len(ring._refused) == 10


async def test_a_record_that_cannot_be_read_opens_nothing(ring: KeyRing, book: Book, tmp_path: Path):
    key = await book.create("alice", Limits(1, 1), 0)
    [record] = await book.everyone()
    await SqliteStore(tmp_path / "store.db").put(f"api-keys/{record.digest}", "{}", ttl_seconds=None)
    assert await refused(ring, key) is ErrorCode.STORE_UNAVAILABLE
