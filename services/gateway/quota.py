"""What a key may use per minute: requests and tokens, in buckets that all gateways share through the store.

A request is charged once, before it is encoded: one request, and the tokens that it may come to (its prompt, estimated, plus max_tokens).
At its end the tokens are settled to what was used. A key without limits costs no call. While the store is away each gateway keeps the
limits by itself, so that a key gets up to as many times its limit as there are gateways.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from libs.api_keys import ApiKey
from libs.errors import ErrorCode, TokenloomError
from libs.store import Balance, Charge, Spending, Store, StoreError
from libs.store.local import LocalBuckets
from libs.telemetry.logs import get_logger
from services.gateway.metrics import GatewayMetrics

Headers = list[tuple[bytes, bytes]]
# Key of the ASGI scope under which the endpoints find the Visit of a stored key.
VISIT = "tokenloom.visit"
HEADER_NAMES = tuple(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens"))

_log = get_logger("gateway.quota")


class Quotas:
    """The buckets, in the store or, while that is away, in this process."""

    def __init__(self, store: Store | None, metrics: GatewayMetrics) -> None:
        self._store, self._metrics = store, metrics
        self._local = LocalBuckets()
        self._is_local = False
        self._settling: set[asyncio.Task[Spending]] = set()

    async def spend(self, charges: Sequence[Charge]) -> Spending:
        """See Store; never raises StoreError."""
        if self._store is not None:
            try:
                spent = await self._store.spend(charges)
            except StoreError as error:
                self._fell_back(error)
            else:
                self._came_back()
                return spent
        return self._local.spend(charges)

    def settle(self, charges: Sequence[Charge]) -> None:
        """See Store; in the background. What the store does not take is settled here."""
        if charges:
            task = asyncio.create_task(self._settle(charges))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self, charges: Sequence[Charge]) -> Spending:
        if self._store is not None and not self._is_local:
            try:
                return await self._store.settle(charges)
            except StoreError as error:
                self._fell_back(error)
        return self._local.settle(charges)

    async def close(self) -> None:
        """Waits for what is being settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def _fell_back(self, error: StoreError) -> None:
        if not self._is_local:
            _log.warning("the store is away; this gateway keeps the limits of keys by itself", reason=str(error))
        self._is_local = True
        self._metrics.quota_local.set(1)

    def _came_back(self) -> None:
        if self._is_local:
            _log.info("the limits of keys are shared again")
            self._local.clear()
        self._is_local = False
        self._metrics.quota_local.set(0)


@dataclass(slots=True)
class Visit:
    """One request of a stored key: its charge, and what its answer's headers say."""

    key: ApiKey
    quotas: Quotas
    charged_tokens: int | None = None
    _balances: dict[str, Balance] = field(default_factory=dict)

    def _charges(self, requests: int, tokens: float) -> Iterator[tuple[str, Charge]]:
        limits, name = self.key.limits, self.key.name
        if limits.requests_per_minute:
            yield "requests", Charge(f"{name}/requests", requests, limits.requests_per_minute)
        if limits.tokens_per_minute:
            yield "tokens", Charge(f"{name}/tokens", tokens, limits.tokens_per_minute)

    async def admit(self, tokens: int) -> None:
        """Charges the request and `tokens`, its estimate. Raises TokenloomError RATE_LIMITED when the key is over a limit."""
        spent = await self._spend(1, tokens)
        if spent is None:
            return
        if not spent.taken:
            raise self._over()
        # More than the whole bucket costs the bucket: what is settled must start from what was charged.
        self.charged_tokens = min(tokens, self.key.limits.tokens_per_minute)

    async def _spend(self, requests: int, tokens: int) -> Spending | None:
        charges = dict(self._charges(requests, tokens))
        if not charges:
            return None
        spent = await self.quotas.spend(list(charges.values()))
        self._balances = dict(zip(charges, spent.balances, strict=True))
        return spent

    def _over(self) -> TokenloomError:
        unit, balance = max(self._balances.items(), key=lambda item: item[1].retry_seconds)
        limits = self.key.limits
        limit = limits.requests_per_minute if unit == "requests" else limits.tokens_per_minute
        message = (
            f"Rate limit reached for key {self.key.name} on {unit} per minute: the limit is {limit}, {balance.remaining} remain. "
            f"Please try again in {duration(balance.retry_seconds)}."
        )
        return TokenloomError(ErrorCode.RATE_LIMITED, message, retry_after_ms=math.ceil(balance.retry_seconds * 1000))

    def settle(self, tokens: int) -> None:
        """The request is over and has used `tokens`. A second call does nothing."""
        charged, self.charged_tokens = self.charged_tokens, None
        if charged is not None and tokens != charged:
            self.quotas.settle([charge for unit, charge in self._charges(0, tokens - charged) if unit == "tokens"])

    async def headers(self) -> Headers:
        """The x-ratelimit headers of the answer: as of the charge, or as of now where nothing was charged."""
        if not self._balances:
            await self._spend(0, 0)
        limits = {"requests": self.key.limits.requests_per_minute, "tokens": self.key.limits.tokens_per_minute}
        found: Headers = []
        for unit, balance in self._balances.items():
            values = {"limit": limits[unit], "remaining": balance.remaining, "reset": duration(balance.reset_seconds)}
            found += [(f"x-ratelimit-{what}-{unit}".encode(), str(value).encode()) for what, value in values.items()]
        return found


def visit_of(scope: Scope) -> Visit | None:
    """The visit of a request that came with a stored key."""
    found = scope.get(VISIT)
    return found if isinstance(found, Visit) else None


def duration(seconds: float) -> str:
    """A time as OpenAI's headers write it: 1s, 6m0s, 120ms; rounded up."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{max(milliseconds, 0)}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
