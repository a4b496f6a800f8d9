"""`tokenloom keys` against a store, as a user types it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from libs.api_keys import KeyBook, Limits, digest_of
from libs.store.sqlite import SqliteStore

run = CliRunner()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def find(url: str, key: str):
    return asyncio.run(KeyBook(SqliteStore(Path(url))).find([digest_of(key.encode())]))[0]


def test_a_key_is_made_limited_listed_and_revoked(url: str):
    made = run.invoke(app, ["keys", "create", "alice", "--rpm", "60", "--store", url])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("tl-")
    assert find(url, key).limits == Limits(60, 0)
    assert run.invoke(app, ["keys", "limit", "alice", "--tpm", "9000", "--store", url]).exit_code == 0
    assert find(url, key).limits == Limits(0, 9000)
    listed = run.invoke(app, ["keys", "list"], env={"TOKENLOOM_STORE": url})
    assert "alice" in listed.stdout
    assert "9000" in listed.stdout
    assert key not in listed.stdout
    assert run.invoke(app, ["keys", "revoke", "alice", "--store", url]).exit_code == 0
    assert find(url, key) is None


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["revoke", "nobody"], 1, "no key named nobody"),
        (["create", "a b"], 2, "is no name"),
        (["create", "alice", "--rpm=-1"], 2, "--rpm"),
    ],
)
def test_what_cannot_be_done_is_said(url: str, args: list[str], code: int, said: str):
    outcome = run.invoke(app, ["keys", *args, "--store", url])
    assert outcome.exit_code == code
    assert said in outcome.stderr


@pytest.mark.parametrize(
    ("store", "code", "said"),
    [
        ("postgres://x", 2, "--store: postgres: is no kind of store"),
        ("/no/such/place/store.db", 2, "does not exist"),
        ("redis://127.0.0.1:1/0", 1, "redis://127.0.0.1:1/0"),
    ],
)
def test_a_store_that_cannot_be_reached_is_named(store: str, code: int, said: str):
    outcome = run.invoke(app, ["keys", "list", "--store", store])
    assert outcome.exit_code == code
    assert said in outcome.stderr


def test_without_a_store_it_is_the_local_meshs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("TOKENLOOM_STORE", raising=False)
    outcome = run.invoke(app, ["keys", "list", "--port", "8123"])
    assert (outcome.exit_code, "no mesh has served on port 8123" in outcome.stderr) == (1, True)
    (tmp_path / "8123").mkdir()
    asyncio.run(SqliteStore(tmp_path / "8123" / "store.db").list(""))
    assert run.invoke(app, ["keys", "create", "alice", "--port", "8123"]).exit_code == 0
