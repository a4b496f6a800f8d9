"""Stored keys and their limits, from HTTP to the store and back, and what goes on while Redis is dead."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.api_keys import KeyBook, Limits
from libs.store import Store, open_store
from libs.store import redis as redis_module
from services.gateway import keys as keys_module
from services.gateway.config import GatewayConfig
from tests.support.gateway_core import running_stack
from tests.support.gateway_fakes import EOS, FakeScheduler, ids_of, say, silence
from tests.support.gateway_process import Gateway, running_gateway, until
from tests.support.redis_server import RedisServer

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy for a second is no store that is away; one that is dead refuses at once."""
    for name in ("CONNECT_TIMEOUT", "ANSWER_TIMEOUT", "POOL_TIMEOUT", "CALL_TIMEOUT"):
        monkeypatch.setattr(redis_module, name, 60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both stores."""
    return str(tmp_path / "store.db") if request.param == "sqlite" else request.getfixturevalue("server").url()


@contextlib.asynccontextmanager
async def guarded(folder: Path, url: str, **config: Any) -> AsyncIterator[tuple[Gateway, KeyBook, Store]]:
    """A gateway that takes the keys of the store, and the store."""
    store = open_store(url)
    async with running_gateway(folder, store=url, api_keys_from_store=True, **config) as gateway:
        yield gateway, KeyBook(store), store
    await store.close()


async def post(gateway: Gateway, key: str, **fields: Any) -> Any:
    return await gateway.client.post(
        "/v1/chat/completions", json={**BODY, **fields}, headers={"authorization": f"Bearer {key}"} if key else {}
    )


async def test_a_stored_key_opens_v1_and_is_named_in_the_trace(tmp_path: Path, url: str):
    async with guarded(tmp_path, url, api_key=["static"]) as (gateway, book, _):
        key = await book.create("alice", Limits(), 0)
        answers = [await post(gateway, key) for key in (key, "static", "wrong", "")]
        assert [answer.status_code for answer in answers] == [200, 200, 401, 401]
        assert not any(name.startswith("x-ratelimit") for answer in answers for name in answer.headers)
        assert await gateway.metric("tokenloom:store_call_seconds_count", operation="spend") == 0, "no limit, no call"
        assert await gateway.metric("tokenloom:request_rejected_total", model_name="tiny", reason="unauthorized") == 2
    tenants = [(span.attributes or {}).get("tokenloom.tenant") for span in gateway.spans.finished if span.name.startswith("POST")]
    assert tenants == ["alice", None]


async def test_a_revoked_key_is_refused_before_long(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keys_module, "REFRESH_SECONDS", 0.05)
    async with guarded(tmp_path, url) as (gateway, book, _):
        key = await book.create("alice", Limits(), 0)
        assert (await post(gateway, key)).status_code == 200
        await book.revoke("alice")
        async with asyncio.timeout(20):
            while (await post(gateway, key)).status_code != 401:
                await asyncio.sleep(0.02)


async def test_over_its_requests_a_key_gets_a_429_in_openais_shape_and_every_answer_shows_what_remains(tmp_path: Path, url: str):
    async with guarded(tmp_path, url) as (gateway, book, _):
        key, other = await book.create("alice", Limits(2, 0), 0), await book.create("bob", Limits(2, 0), 0)
        taken = [await post(gateway, key) for _ in range(2)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in taken] == ["1", "0"]
        refused = await post(gateway, key)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (refused.headers["x-ratelimit-limit-requests"], refused.headers["x-ratelimit-remaining-requests"]) == ("2", "0")
        assert (await post(gateway, other)).status_code == 200
        assert await gateway.metric("tokenloom:request_rejected_total", model_name="tiny", reason="rate_limit_exceeded") == 1
        headers = {"authorization": f"Bearer {key}"}
        assert (await gateway.client.get("/v1/models", headers=headers)).headers["x-ratelimit-remaining-requests"] == "0"
        wrong = await gateway.client.post("/v1/chat/completions", content=b"{", headers={**headers, "content-type": "application/json"})
        assert (wrong.status_code, wrong.headers["x-ratelimit-remaining-requests"]) == (400, "0")
        await gateway.until_idle()


async def test_tokens_are_charged_by_estimate_and_settled_to_what_was_used(tmp_path: Path, url: str):
    async with guarded(tmp_path, url, scheduler=FakeScheduler(say("hello"))) as (gateway, book, _):
        key = await book.create("alice", Limits(0, 100_000), 0)
        answer = await post(gateway, key, max_tokens=400)
        assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 99_600 + 100
        used = answer.json()["usage"]["total_tokens"]
        await gateway.until_idle()
        await gateway.mesh.quotas.close()
        models = await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert int(models.headers["x-ratelimit-remaining-tokens"]) >= 100_000 - used


async def test_without_max_tokens_the_prompt_is_charged_first_and_the_output_at_the_end(tmp_path: Path, url: str):
    async with guarded(tmp_path, url, scheduler=FakeScheduler(silence)) as (gateway, book, _):
        key = await book.create("alice", Limits(0, 1000), 0)
        asked = [asyncio.create_task(post(gateway, key)) for _ in range(3)]
        for _ in asked:
            session, submit = await gateway.scheduler.submitted.get()
            session.emit(submit.id, [*ids_of("x" * 200), EOS])
            session.emit(submit.id, [], ending=session.ending(submit.id))
        assert [(await task).status_code for task in asked] == [200, 200, 200], "their context is 512 tokens, and they used less"
        await gateway.until_idle()
        await gateway.mesh.quotas.close()
        models = await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert int(models.headers["x-ratelimit-remaining-tokens"]) < 900


async def test_a_refused_request_leaves_no_place_in_the_window_taken(tmp_path: Path, url: str):
    async with guarded(tmp_path, url) as (gateway, book, _):
        key = await book.create("alice", Limits(1, 0), 0)
        assert [(await post(gateway, key)).status_code for _ in range(3)] == [200, 429, 429]
        await gateway.until_idle()
        assert len(gateway.scheduler.sessions[0].submits) == 1


async def test_two_gateways_share_a_keys_limit(tmp_path: Path, server: RedisServer):
    (tmp_path / "other").mkdir()
    async with guarded(tmp_path, server.url()) as (one, book, _), guarded(tmp_path / "other", server.url()) as (two, _, _):
        key = await book.create("alice", Limits(4, 0), 0)
        started = time.monotonic()
        answers = await asyncio.gather(*(post(gateway, key) for _ in range(4) for gateway in (one, two)))
        refilled = int((time.monotonic() - started) / 15)  # on a machine so busy that this takes long, one more fits every 15 s
        statuses = [answer.status_code for answer in answers]
        assert 4 <= statuses.count(200) <= 4 + refilled, [answer.text for answer in answers]
        assert statuses.count(200) + statuses.count(429) == 8


async def test_a_streams_headers_carry_the_limits_too(tmp_path: Path, url: str):
    async with guarded(tmp_path, url) as (gateway, book, _):
        key = await book.create("alice", Limits(5, 5000), 0)
        answer = await post(gateway, key, stream=True)
        assert answer.headers["x-ratelimit-remaining-requests"] == "4"
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_gateway_whose_store_is_away_from_the_start_is_closed_and_not_open(tmp_path: Path, server: RedisServer):
    server.kill()
    async with guarded(tmp_path, server.url(), api_key=["static"]) as (gateway, book, _):
        answers = {key: await post(gateway, key) for key in ("static", "unknown", "")}
        assert [answer.status_code for answer in answers.values()] == [200, 503, 401]
        assert answers["unknown"].json()["error"]["code"] == "store_unavailable"
        assert "retry-after" in answers["unknown"].headers
        assert (await gateway.client.get("/ready")).status_code == 200
        server.start()
        async with asyncio.timeout(60):
            while (await post(gateway, "unknown")).status_code != 401:
                await asyncio.sleep(0.05)
        assert (await post(gateway, await book.create("alice", Limits(), 0))).status_code == 200


async def test_while_redis_is_dead_a_known_key_goes_on_within_its_limits(tmp_path: Path, server: RedisServer):
    async with guarded(tmp_path, server.url()) as (gateway, book, _):
        key = await book.create("alice", Limits(3, 100_000), 0)
        assert (await post(gateway, key)).status_code == 200
        server.kill()
        statuses = [(await post(gateway, key)).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429], "this gateway alone counts, from a full bucket"
        assert await gateway.metric("tokenloom:gateway_quota_local") == 1
        assert await gateway.metric("tokenloom:store_failures_total", operation="spend") >= 1
        server.start()
        async with asyncio.timeout(60):
            while await gateway.metric("tokenloom:gateway_quota_local"):
                await post(gateway, key)
                await asyncio.sleep(0.05)


async def test_an_interrupted_request_is_settled_to_what_it_got(tmp_path: Path, server: RedisServer):
    async with guarded(tmp_path, server.url(), scheduler=FakeScheduler(silence), request_timeout=0.2) as (gateway, book, _):
        key = await book.create("alice", Limits(0, 1000), 0)
        assert (await post(gateway, key, max_tokens=400)).status_code == 504
        await gateway.until_idle()
        await gateway.mesh.quotas.close()
        models = await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert int(models.headers["x-ratelimit-remaining-tokens"]) > 900


def test_keys_from_a_store_that_is_not_named_stop_the_start():
    with pytest.raises(ValueError, match="--api-keys-from-store: there is no --store"):
        GatewayConfig(api_keys_from_store=True)


async def test_redis_dies_in_the_middle_of_load_and_no_request_notices(tmp_path: Path, server: RedisServer):
    """Gateway, scheduler and worker find each other by Redis; it is killed and comes back empty; they serve on and register again."""
    async with running_stack(tmp_path, gateway={"store": server.url()}, store=server.url()) as stack:
        prompts = [[1 + number % 7, 2, 3] for number in range(60)]
        stack.worker.gate.clear()
        load = [asyncio.create_task(stack.complete(prompt, max_tokens=16)) for prompt in prompts[:20]]
        await until(lambda: len(stack.gateway.mesh.open) == 20 and len(stack.mesh.state.requests) == 20, timeout=30)
        server.kill()
        stack.worker.gate.set()
        load += [asyncio.create_task(stack.complete(prompt, max_tokens=16)) for prompt in prompts[20:40]]
        await asyncio.gather(*load)
        server.start()
        await asyncio.gather(*(stack.complete(prompt, max_tokens=16) for prompt in prompts[40:]))
        store = open_store(server.url())
        async with asyncio.timeout(60):
            while not await store.list("schedulers/0/"):
                await asyncio.sleep(0.05)
        await store.close()
        assert not stack.mesh.engine.superseded.is_set()
        await until(lambda: not stack.gateway.mesh.open)
