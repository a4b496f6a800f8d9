"""Keys as the store keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libs.api_keys import ApiKey, KeyBook, Limits, digest_of
from libs.errors import ErrorCode, TokenloomError
from libs.store.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store.db")


@pytest.fixture
def book(store: SqliteStore) -> KeyBook:
    return KeyBook(store)


async def test_a_key_is_found_by_its_hash_and_is_not_in_the_store(book: KeyBook, store: SqliteStore):
    key = await book.create("alice", Limits(3, 1000), 1_800_000_000)
    assert await book.find([digest_of(key.encode()), digest_of(b"other")]) == [
        ApiKey("alice", digest_of(key.encode()), Limits(3, 1000), 1_800_000_000),
        None,
    ]
    assert not any(key in entry.key + entry.value for entry in await store.list(""))


async def test_every_key_is_another_and_they_are_listed_by_name(book: KeyBook):
    keys = {await book.create(name, Limits(), 0) for name in ("bob", "alice", "carol@example.org")}
    assert len(keys) == 3
    assert [key.name for key in await book.everyone()] == ["alice", "bob", "carol@example.org"]


async def test_a_name_is_given_once_also_to_those_who_ask_at_once(book: KeyBook):
    outcomes = await asyncio.gather(*(book.create("alice", Limits(), 0) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 1
    assert {outcome.code for outcome in outcomes if isinstance(outcome, TokenloomError)} == {ErrorCode.INVALID_REQUEST}
    assert len(await book.everyone()) == 1


async def test_a_revoked_key_is_gone_and_its_name_is_free(book: KeyBook):
    first = await book.create("alice", Limits(), 0)
    await book.revoke("alice")
    assert await book.find([digest_of(first.encode())]) == [None]
    assert await book.create("alice", Limits(), 0) != first


async def test_limits_are_replaced_and_the_key_stays(book: KeyBook):
    key = await book.create("alice", Limits(3, 0), 7)
    await book.set_limits("alice", Limits(0, 500))
    assert await book.find([digest_of(key.encode())]) == [ApiKey("alice", digest_of(key.encode()), Limits(0, 500), 7)]


@pytest.mark.parametrize("work", ["revoke", "set_limits"])
async def test_what_is_not_there_cannot_be_changed(book: KeyBook, work: str):
    with pytest.raises(TokenloomError, match="no key named alice") as error:
        await (book.revoke("alice") if work == "revoke" else book.set_limits("alice", Limits()))
    assert error.value.code is ErrorCode.NOT_FOUND


async def test_new_limits_do_not_bring_a_revoked_key_back(book: KeyBook, store: SqliteStore):
    key = await book.create("alice", Limits(), 0)
    await store.delete(f"api-keys/{digest_of(key.encode())}")  # half of a revocation, by another process
    with pytest.raises(TokenloomError):
        await book.set_limits("alice", Limits(5, 5))
    assert await book.everyone() == []


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "a/b", "x" * 65, "é"])
async def test_a_name_that_would_confuse_is_refused(book: KeyBook, name: str):
    with pytest.raises(TokenloomError) as error:
        await book.create(name, Limits(), 0)
    assert error.value.param == "NAME"


@pytest.mark.parametrize(("limits", "param"), [(Limits(-1, 0), "--rpm"), (Limits(0, 10**9 + 1), "--tpm")])
async def test_a_limit_out_of_range_is_refused(book: KeyBook, limits: Limits, param: str):
    with pytest.raises(TokenloomError) as error:
        await book.create("alice", limits, 0)
    assert error.value.param == param
    assert await book.everyone() == []


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"name": "x", "requests_per_minute": 1, "created": 0}'])
async def test_a_record_that_cannot_be_read_is_an_error_and_not_a_key_without_limits(book: KeyBook, store: SqliteStore, record: str):
    await store.put(f"api-keys/{digest_of(b'k')}", record, ttl_seconds=None)
    with pytest.raises(ValueError, match="cannot be read"):
        await book.find([digest_of(b"k")])
