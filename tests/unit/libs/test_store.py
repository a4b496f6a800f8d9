"""The contract of Store. A further implementation joins by adding its factory to `STORES`: (directory) -> Store on shared state."""

import gc
import sqlite3
import threading

import psutil
import pytest

from libs.store import Entry, SqliteStore, StoreError


def sqlite_store(directory):
    return SqliteStore(directory / "store.db")


STORES = {"sqlite": sqlite_store}


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def open_store(request, tmp_path):
    """Opens a further client of the same store, as another process would."""
    return lambda: request.param(tmp_path)


def test_what_one_client_puts_another_lists(open_store):
    open_store().put("workers/a", "here", ttl_seconds=60)
    assert open_store().list("workers/") == [Entry("workers/a", "here")]


def test_entries_are_listed_by_key_and_by_prefix_alone(open_store):
    store = open_store()
    for key in ("workers/b", "workers/a", "worker", "workers0", "other/a"):
        store.put(key, key, ttl_seconds=60)
    assert [entry.key for entry in store.list("workers/")] == ["workers/a", "workers/b"]
    assert len(store.list("")) == 5


@pytest.mark.parametrize("odd", ["%", "_", "*", "'", "é", "\U0001f9f5"])
def test_a_prefix_is_taken_literally(open_store, odd):
    store = open_store()
    store.put(f"a{odd}b", "1", ttl_seconds=60)
    store.put("axb", "2", ttl_seconds=60)
    assert [entry.value for entry in store.list(f"a{odd}")] == ["1"]


def test_putting_again_replaces_the_value(open_store):
    store = open_store()
    store.put("key", "old", ttl_seconds=60)
    store.put("key", "new", ttl_seconds=60)
    assert store.list("key") == [Entry("key", "new")]


def test_an_entry_whose_lease_ran_out_is_gone(open_store):
    store = open_store()
    store.put("gone", "", ttl_seconds=-1)
    store.put("here", "", ttl_seconds=60)
    assert [entry.key for entry in store.list("")] == ["here"]


def test_renewing_brings_an_entry_back(open_store):
    store = open_store()
    store.put("key", "", ttl_seconds=-1)
    store.put("key", "", ttl_seconds=60)
    assert store.list("key")


def test_deleting_twice_is_deleting_once(open_store):
    store = open_store()
    store.put("key", "", ttl_seconds=60)
    store.delete("key")
    store.delete("key")
    assert store.list("") == []


def test_a_counter_only_grows_for_every_client(open_store):
    assert [open_store().raise_counter("token") for _ in range(3)] == [1, 2, 3]


def test_a_counter_passes_what_its_caller_has_seen(open_store):
    store = open_store()
    assert store.raise_counter("token", at_least=41) == 42
    assert store.raise_counter("token", at_least=7) == 43


def test_counters_have_nothing_to_do_with_each_other(open_store):
    store = open_store()
    store.raise_counter("a", at_least=9)
    assert store.raise_counter("b") == 1


def test_two_clients_never_get_the_same_token(open_store):
    open_store()
    tokens, lock = [], threading.Lock()

    def take():
        store = open_store()
        for _ in range(20):
            token = store.raise_counter("token")
            with lock:
                tokens.append(token)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(tokens) == list(range(1, 81))


def test_a_store_that_cannot_be_opened_says_which(tmp_path):
    with pytest.raises(StoreError, match=r"missing/store\.db"):
        SqliteStore(tmp_path / "missing" / "store.db")


def test_a_broken_file_is_a_store_error_and_not_a_database_error(tmp_path):
    path = tmp_path / "store.db"
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StoreError):
        SqliteStore(path)


def test_a_file_that_breaks_later_is_a_store_error(tmp_path):
    store = SqliteStore(tmp_path / "store.db")
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("DROP TABLE entries")
    connection.close()
    with pytest.raises(StoreError):
        store.list("")


def test_no_file_stays_open_until_the_garbage_is_collected(tmp_path):
    gc.disable()  # only a collection would close what was forgotten
    try:
        store = sqlite_store(tmp_path)
        store.put("workers/a", "here", ttl_seconds=60)
        sqlite_store(tmp_path).list("workers/")
        assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]
    finally:
        gc.enable()


def test_reading_a_counter_does_not_raise_it(open_store):
    store = open_store()
    assert store.read_counter("token") == 0
    store.raise_counter("token", at_least=41)
    assert [store.read_counter("token"), open_store().read_counter("token")] == [42, 42]
    assert store.raise_counter("token") == 43
