"""API keys in the store: who may use /v1, and how much of it. Only a key's SHA-256 is kept; the key itself is shown once, when it is made.

api-keys/<sha256>        the record: name, limits, when it was made
api-key-names/<name>     the key's sha256; whoever puts it first has the name
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from libs.errors import ErrorCode, TokenloomError
from libs.store import Store, When

_RECORDS, _NAMES = "api-keys/", "api-key-names/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}")
# Above it a bucket's arithmetic would lose units to rounding.
MOST_PER_MINUTE = 1_000_000_000
# How keys look: searchable by who scans for leaked ones, and 256 bits that nobody guesses, so that a plain hash hides them.
_MARK = "tl-"


def digest_of(key: bytes) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key).hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key, over all gateways; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the store knows it; `name` is what logs, traces and messages call it. `created_unix`: seconds."""

    name: str
    digest: str
    limits: Limits
    created_unix: int

    def to_json(self) -> str:
        """The record."""
        return json.dumps(
            {
                "name": self.name,
                "created": self.created_unix,
                "requests_per_minute": self.limits.requests_per_minute,
                "tokens_per_minute": self.limits.tokens_per_minute,
            }
        )

    @classmethod
    def from_json(cls, digest: str, value: str) -> ApiKey:
        """Reads a record. Raises ValueError for what is none: such a key must not be taken for one without limits."""
        try:
            found = json.loads(value)
            limits = Limits(int(found["requests_per_minute"]), int(found["tokens_per_minute"]))
            return cls(str(found["name"]), digest, limits, int(found["created"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the record of key {digest[:12]} cannot be read ({type(error).__name__})") from error


class KeyBook:
    """The keys of a store. Every method may raise StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, name: str, limits: Limits, now_unix: int) -> str:
        """Makes a key and returns it. Raises TokenloomError (INVALID_REQUEST) for a name that is none or taken, and for limits."""
        _check_name(name)
        _check_limits(limits)
        key = _MARK + secrets.token_urlsafe(32)
        made = ApiKey(name, digest_of(key.encode()), limits, now_unix)
        if not await self._store.put(_NAMES + name, made.digest, ttl_seconds=None, when=When.ABSENT):
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"there is a key named {name} already; revoke it first", param="NAME")
        await self._store.put(_RECORDS + made.digest, made.to_json(), ttl_seconds=None)
        return key

    async def everyone(self) -> list[ApiKey]:
        """All keys, by name. Raises ValueError for a record that cannot be read."""
        entries = await self._store.list(_RECORDS)
        return sorted((ApiKey.from_json(entry.key.removeprefix(_RECORDS), entry.value) for entry in entries), key=lambda key: key.name)

    async def revoke(self, name: str) -> None:
        """Ends a key. Raises TokenloomError (NOT_FOUND) where there is none of that name."""
        digest = await self._digest(name)
        await self._store.delete(_RECORDS + digest)
        await self._store.delete(_NAMES + name)

    async def set_limits(self, name: str, limits: Limits) -> None:
        """Replaces a key's limits. Raises TokenloomError as `create` and `revoke` do."""
        _check_limits(limits)
        digest = await self._digest(name)
        [record] = await self._store.get([_RECORDS + digest])
        changed = None if record is None else ApiKey(name, digest, limits, ApiKey.from_json(digest, record).created_unix)
        # A key that is revoked meanwhile must not come back.
        if changed is None or not await self._store.put(_RECORDS + digest, changed.to_json(), ttl_seconds=None, when=When.PRESENT):
            raise _unknown(name)

    async def find(self, digests: Sequence[str]) -> list[ApiKey | None]:
        """The keys of these digests; None where there is none. Raises ValueError for a record that cannot be read."""
        found = await self._store.get([_RECORDS + digest for digest in digests])
        return [None if value is None else ApiKey.from_json(digest, value) for digest, value in zip(digests, found, strict=True)]

    async def _digest(self, name: str) -> str:
        [digest] = await self._store.get([_NAMES + name])
        if digest is None:
            raise _unknown(name)
        return digest


def _unknown(name: str) -> TokenloomError:
    return TokenloomError(ErrorCode.NOT_FOUND, f"there is no key named {name}", param="NAME")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name: 1 to 64 characters of A-Z a-z 0-9 _ . @ + -, beginning with a letter or digit"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, message, param="NAME")


def _check_limits(limits: Limits) -> None:
    for flag, value in (("--rpm", limits.requests_per_minute), ("--tpm", limits.tokens_per_minute)):
        if not 0 <= value <= MOST_PER_MINUTE:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{flag} is {value}; 0 (none) to {MOST_PER_MINUTE} are", param=flag)
