"""Which URL means which store, and which is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.store import open_store
from libs.store.redis import RedisStore
from libs.store.sqlite import SqliteStore


def test_a_path_is_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(open_store(str(tmp_path / "store.db")), SqliteStore)
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store("store.db"), SqliteStore)
    assert not list(tmp_path.iterdir()), "opening makes nothing"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("redis://redis", "redis://redis:6379"),
        ("rediss://user:secret@redis:6380/2?ssl_cert_reqs=none&prefix=a.b-C_1", "rediss://redis:6380/2"),
        ("unix:///run/redis.sock?db=3", "unix:///run/redis.sock"),
        ("redis://:se%40cret@[::1]:7/1", "redis://::1:7/1"),
    ],
)
def test_a_redis_url_is_redis_and_its_name_has_no_password(url: str, name: str):
    store = open_store(url)
    assert isinstance(store, RedisStore)
    assert store.name == name


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://redis:26379/mymaster", "is no kind of store"),
        ("rediss+cluster://redis:6379", "is no kind of store"),
        ("postgres://db/x", "postgres: is no kind of store"),
        ("sqlite:///x.db", "is no kind of store"),
        ("REDIS://redis", "is no kind of store"),
        ("unix:/run/redis.sock", "is no kind of store"),
        ("redis:6379", "is no kind of store"),
        ("unix://run/redis.sock", "three slashes"),
        ("redis://redis:port/0", "[Pp]ort"),
        ("redis://redis/?socket_timeout=100", "socket_timeout is no option"),
        ("redis://redis/zero", "zero is no database"),
        ("redis://redis/0/tokenloom", "0/tokenloom is no database"),
        ("redis://redis/?prefix=", "namespace"),
        ("redis://redis/?prefix=a:b", "namespace"),
        ("/no/such/directory/store.db", "/no/such/directory/store.db: the directory does not exist"),
        ("", "empty"),
    ],
)
def test_anything_else_is_refused_naming_the_flag(url: str, reason: str):
    with pytest.raises(TokenloomError, match=f"--store: .*{reason}") as refused:
        open_store(url)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, "--store")
