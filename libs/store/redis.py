"""The store of a cluster: one Redis (or Valkey) server, 5 or newer. No Sentinel, no Redis Cluster: the URL names one server.

Keys, under the namespace of the mesh (`tokenloom`; ?prefix= in the URL chooses another, for several meshes in one Redis):

    <prefix>:entry:<key>    a value, its lease the key's own expiry        <prefix>:index         every entry's key, sorted, for listing
    <prefix>:counter:<name> a counter                                      <prefix>:bucket:<name> when a bucket is full; gone: full

What consists of several commands is a Lua script. A server that comes back empty is a store in which nothing has been put yet.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.store.base import Entry, StoreError, StoreObserver, When, observed
from libs.store.buckets import Charge, Spending, spending

MAX_CONNECTIONS = 32
# Seconds: to get a connection of the pool; to connect; for an answer; for a call altogether, whatever it waits for.
POOL_TIMEOUT = 5.0
CONNECT_TIMEOUT = 1.0
ANSWER_TIMEOUT = 2.0
CALL_TIMEOUT = 5.0
# Seconds after which a connection that was idle is tried before it is used.
HEALTH_CHECK_SECONDS = 15
# Seconds for which calls fail at once after the first, second, ... failure in a row to reach the server; then one call tries again.
BACKOFF_FIRST, BACKOFF_MOST = 0.1, 2.0

_PUT = """
if ARGV[2] ~= '' and tonumber(ARGV[2]) <= 0 then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[4])
  return 1
end
local here = redis.call('EXISTS', KEYS[1])
if (ARGV[3] == 'absent' and here == 1) or (ARGV[3] == 'present' and here == 0) then return 0 end
if ARGV[2] == '' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
redis.call('ZADD', KEYS[2], 0, ARGV[4])
return 1
"""
# The entries' keys are known inside only: what the index names and is gone has lost its lease, and leaves the index here.
_LIST = """
local found = {}
for _, key in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2])) do
  local value = redis.call('GET', ARGV[3] .. key)
  if value then
    found[#found + 1] = key
    found[#found + 1] = value
  else
    redis.call('ZREM', KEYS[1], key)
  end
end
return found
"""
_RAISE = """
local value = string.format('%.0f', math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])) + 1)
redis.call('SET', KEYS[1], value)
return value
"""
# buckets.take in Lua. ARGV: the instant ('': the server's own), force, then cost, limit and period of each bucket in KEYS.
_TAKE = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local force, taken, begun, after = ARGV[2] == '1', 1, {}, {}
for i, key in ipairs(KEYS) do
  local cost, limit, period = tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
  if not force then cost = math.min(cost, limit) end
  begun[i] = math.max(tonumber(redis.call('GET', key) or '0'), now)
  after[i] = math.max(begun[i] + cost * period / limit, now)
  if not force and after[i] > now + period then taken = 0 end
end
local answer = {taken, string.format('%.3f', now)}
for i, key in ipairs(KEYS) do
  local full_at = string.format('%.3f', taken == 1 and after[i] or begun[i])
  if taken == 1 then
    local lasts = math.ceil((after[i] - now) / 1000)
    if lasts > 0 then redis.call('SET', key, full_at, 'PX', lasts) else redis.call('DEL', key) end
  end
  answer[#answer + 1] = full_at
end
return answer
"""
_T = TypeVar("_T")


class RedisStore:
    """Store in one Redis. Connections are made when they are needed, at most MAX_CONNECTIONS, in the loop of the first call.

    `url`: redis://, rediss:// or unix:// as redis-py reads it; `name`: what messages call it; `clock` gives the Unix seconds by which
    buckets fill (None: the server's, so that all processes go by one clock).
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        prefix: str = "tokenloom",
        observer: StoreObserver | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._name, self._prefix, self._observer, self._clock = name, prefix, observer, clock
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=POOL_TIMEOUT,
            socket_timeout=ANSWER_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            health_check_interval=HEALTH_CHECK_SECONDS,
            decode_responses=True,
            protocol=2,
            # One more try, for the pooled connection that a restarted server has closed. A call that was not answered is not repeated.
            retry=Retry(ExponentialWithJitterBackoff(cap=0.05, base=0.01), 1, supported_errors=(RedisConnectionError,)),
        )
        self._redis: Any = Redis.from_pool(pool)  # its methods are typed as both awaitable and not
        self._scripts = {text: self._redis.register_script(text) for text in (_PUT, _LIST, _RAISE, _TAKE)}
        self._gate = _Gate()

    @property
    def name(self) -> str:
        """See Store."""
        return self._name

    @property
    def host(self) -> str:
        """See Store."""
        return str(self._redis.get_connection_kwargs().get("host", ""))

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}:{kind}:{name}"

    @property
    def _index(self) -> str:
        return f"{self._prefix}:index"

    async def put(self, key: str, value: str, *, ttl_seconds: float | None, when: When = When.ALWAYS) -> bool:
        """See Store."""
        lease = "" if ttl_seconds is None else str(round(ttl_seconds * 1000))
        answer = await self._script("put", _PUT, [self._key("entry", key), self._index], [value, lease, when.value, key])
        return bool(answer)

    async def get(self, keys: Sequence[str]) -> list[str | None]:
        """See Store."""
        if not keys:
            return []
        answer = await self._call("get", lambda: self._redis.mget([self._key("entry", key) for key in keys]))
        return cast("list[str | None]", answer)

    async def list(self, prefix: str) -> list[Entry]:
        """See Store."""
        # 0xff comes in no UTF-8: it lies above every key that begins with the prefix.
        span = [b"[" + prefix.encode(), b"[" + prefix.encode() + b"\xff"]
        found = await self._script("list", _LIST, [self._index], [*span, self._key("entry", "")])
        return [Entry(key, value) for key, value in zip(found[::2], found[1::2], strict=True)]

    async def delete(self, key: str) -> None:
        """See Store."""
        await self._script("delete", _PUT, [self._key("entry", key), self._index], ["", "0", When.ALWAYS.value, key])

    async def raise_counter(self, name: str, *, at_least: int = 0) -> int:
        """See Store."""
        return int(await self._script("raise_counter", _RAISE, [self._key("counter", name)], [at_least]))

    async def read_counter(self, name: str) -> int:
        """See Store."""
        return int(await self._call("read_counter", lambda: self._redis.get(self._key("counter", name))) or 0)

    async def spend(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return await self._take("spend", charges)

    async def settle(self, charges: Sequence[Charge]) -> Spending:
        """See Store."""
        return await self._take("settle", charges)

    async def _take(self, operation: str, charges: Sequence[Charge]) -> Spending:
        now = "" if self._clock is None else repr(self._clock() * 1e6)
        costs = [repr(value) for charge in charges for value in (charge.cost, charge.limit, charge.period_us)]
        keys = [self._key("bucket", charge.bucket) for charge in charges]
        taken, instant, *full_at = await self._script(operation, _TAKE, keys, [now, int(operation == "settle"), *costs])
        return spending(charges, [float(at) for at in full_at], float(instant), taken=bool(taken))

    async def close(self) -> None:
        """See Store."""
        await self._redis.aclose(close_connection_pool=True)

    async def _script(self, operation: str, text: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._call(operation, lambda: self._scripts[text](keys=keys, args=args))

    async def _call(self, operation: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """The answer, or StoreError: at once while the server is known to be away, within CALL_TIMEOUT otherwise."""
        with observed(self._observer, operation):
            reason = self._gate.enter()
            if reason:
                raise StoreError(f"{self._name}: {reason}")
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    answer = await call()
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:  # OSError: the built-in TimeoutError too
                reason = str(error) or f"no answer within {CALL_TIMEOUT:g} s"
                self._gate.failed(reason)
                raise StoreError(f"{self._name}: {reason}") from error
            except RedisError as error:  # it answers, if only to refuse: read-only, out of memory, a script that it does not take
                self._gate.answered()
                raise StoreError(f"{self._name}: {error}") from error
            except asyncio.CancelledError:
                self._gate.left()
                raise
            self._gate.answered()
            return answer


class _Gate:
    """Shut for a while after a failure to reach the server; then one call at a time may try, and the first answer opens it."""

    def __init__(self) -> None:
        self._failures = 0
        self._shut_until = 0.0
        self._trying = False
        self._reason = ""

    def enter(self) -> str:
        """Why a call may not be made now; empty when it may."""
        if not self._failures:
            return ""
        if self._trying or time.monotonic() < self._shut_until:
            return f"cannot be reached: {self._reason}"
        self._trying = True
        return ""

    def failed(self, reason: str) -> None:
        """A call did not reach the server."""
        backoff = min(BACKOFF_FIRST * 2.0 ** min(self._failures, 16), BACKOFF_MOST)
        # Jitter, so that many processes do not return to a restarted server in the same instant.
        self._shut_until = time.monotonic() + backoff * random.uniform(0.5, 1.0)
        self._failures, self._trying, self._reason = self._failures + 1, False, reason

    def answered(self) -> None:
        """The server answered."""
        self._failures, self._trying = 0, False

    def left(self) -> None:
        """A call was given up by its caller."""
        self._trying = False
