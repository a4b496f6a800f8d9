"""What is charged, settled and told; and what goes on without the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from libs.api_keys import ApiKey, Limits
from libs.errors import ErrorCode, TokenloomError
from libs.store import Charge, Spending, StoreError
from libs.store.local import LocalBuckets
from libs.store.sqlite import SqliteStore
from services.gateway.metrics import GatewayMetrics
from services.gateway.quota import Quotas, Visit, duration


class Shared(SqliteStore):
    """Buckets in memory, with a clock of the test's, that can be away."""

    def __init__(self) -> None:
        self.now, self.away, self.calls = 1000.0, False, 0
        self.buckets = LocalBuckets(lambda: self.now)

    def _take_part(self) -> None:
        self.calls += 1
        if self.away:
            raise StoreError("away")

    async def spend(self, charges: Sequence[Charge]) -> Spending:
        self._take_part()
        return self.buckets.spend(charges)

    async def settle(self, charges: Sequence[Charge]) -> Spending:
        self._take_part()
        return self.buckets.settle(charges)


@pytest.fixture
def store() -> Shared:
    return Shared()


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics("tiny")


@pytest.fixture
def quotas(store: Shared, metrics: GatewayMetrics) -> Quotas:
    return Quotas(store, metrics)


def visit(quotas: Quotas, rpm: int = 0, tpm: int = 0) -> Visit:
    return Visit(ApiKey("alice", "d", Limits(rpm, tpm), 0), quotas)


async def headers_of(one: Visit) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in await one.headers()}


async def over(one: Visit, tokens: int) -> TokenloomError:
    with pytest.raises(TokenloomError) as error:
        await one.admit(tokens)
    assert error.value.code is ErrorCode.RATE_LIMITED
    return error.value


async def test_a_key_without_limits_makes_no_store_call_and_has_no_headers(quotas: Quotas, store: Shared):
    one = visit(quotas)
    await one.admit(100)
    one.settle(50)
    await quotas.close()
    assert (await headers_of(one), store.calls) == ({}, 0)


async def test_a_request_is_charged_in_one_call_and_its_answer_says_what_remains(quotas: Quotas, store: Shared):
    one = visit(quotas, rpm=3, tpm=1000)
    await one.admit(100)
    assert store.calls == 1
    assert await headers_of(one) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "20s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert store.calls == 1


async def test_over_a_limit_it_is_refused_with_the_time_to_wait_and_nothing_is_charged(quotas: Quotas, store: Shared):
    for _ in range(2):
        await visit(quotas, rpm=2, tpm=1000).admit(10)
    refused = visit(quotas, rpm=2, tpm=1000)
    error = await over(refused, 10)
    assert error.retry_after_ms == 30_000
    assert "key alice on requests per minute: the limit is 2, 0 remain. Please try again in 30s" in error.message
    assert (await headers_of(refused))["x-ratelimit-remaining-tokens"] == "980"
    store.now += 30
    await visit(quotas, rpm=2, tpm=1000).admit(10)


async def test_the_tokens_are_settled_to_what_was_used(quotas: Quotas):
    one = visit(quotas, tpm=1000)
    await one.admit(900)
    await over(visit(quotas, tpm=1000), 900)
    one.settle(100)
    one.settle(100)
    await quotas.close()
    assert (await headers_of(visit(quotas, tpm=1000)))["x-ratelimit-remaining-tokens"] == "900"


async def test_who_used_more_than_was_charged_waits_longer(quotas: Quotas, store: Shared):
    one = visit(quotas, tpm=1000)
    await one.admit(5000)
    assert one.charged_tokens == 1000, "a full bucket lets one request through whatever its size"
    one.settle(3000)
    await quotas.close()
    assert (await over(visit(quotas, tpm=1000), 1)).retry_after_ms == pytest.approx(120_060, abs=2)
    store.now += 121
    await visit(quotas, tpm=1000).admit(1)


async def test_a_refused_request_settles_nothing(quotas: Quotas, store: Shared):
    await visit(quotas, rpm=1, tpm=1000).admit(10)
    refused = visit(quotas, rpm=1, tpm=1000)
    await over(refused, 10)
    refused.settle(0)
    await quotas.close()
    assert store.calls == 2


async def test_an_answer_without_a_charge_tells_how_it_stands_and_costs_nothing(quotas: Quotas):
    await visit(quotas, rpm=3).admit(1)
    first, second = await headers_of(visit(quotas, rpm=3)), await headers_of(visit(quotas, rpm=3))
    assert first == second
    assert first["x-ratelimit-remaining-requests"] == "2"


async def test_while_the_store_is_away_the_process_keeps_the_limits_and_says_so(quotas: Quotas, store: Shared, metrics: GatewayMetrics):
    def is_local() -> float | None:
        return metrics.registry.get_sample_value("tokenloom:gateway_quota_local")

    await visit(quotas, rpm=2).admit(1)
    assert is_local() == 0
    store.away = True
    for _ in range(2):
        await visit(quotas, rpm=2).admit(1)
    await over(visit(quotas, rpm=2), 1)
    assert is_local() == 1
    store.away = False
    await visit(quotas, rpm=2).admit(1)
    assert is_local() == 0
    await over(visit(quotas, rpm=2), 1)


async def test_what_cannot_be_settled_in_the_store_raises_nothing(quotas: Quotas, store: Shared):
    one = visit(quotas, tpm=100)
    await one.admit(100)
    store.away = True
    one.settle(10)
    await quotas.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0004, "1ms"), (0.12, "120ms"), (0.9999, "1s"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s"), (7261.5, "121m2s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str):
    assert duration(seconds) == text
