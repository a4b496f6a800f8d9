"""`tokenloom keys`: makes, lists, limits and revokes the API keys that gateways with --api-keys-from-store take."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.table import Table

from cli.rundir import candidates
from libs.api_keys import KeyBook, Limits
from libs.errors import ErrorCode, TokenloomError
from libs.store import StoreError, open_store


def create(name: str, *, rpm: int, tpm: int, store: str, port: int) -> int:
    """Prints a new key, the only time that it is shown."""

    async def work(book: KeyBook) -> None:
        key = await book.create(name, Limits(rpm, tpm), int(time.time()))
        print(key)
        print(f"The key of {name}. It is not shown again: only its SHA-256 is stored.", file=sys.stderr)

    return _run(work, store, port)


def show(*, store: str, port: int) -> int:
    """Prints all keys' names, limits and ages."""

    async def work(book: KeyBook) -> None:
        table = Table(box=None)
        for title in ("NAME", "REQUESTS/MIN", "TOKENS/MIN", "MADE (UTC)", "SHA-256"):
            table.add_column(title, justify="right" if title.endswith("MIN") else "left")
        for key in await book.everyone():
            made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.created_unix))
            limits = (key.limits.requests_per_minute, key.limits.tokens_per_minute)
            table.add_row(key.name, *(str(limit) if limit else "-" for limit in limits), made, key.digest[:12])
        Console().print(table)

    return _run(work, store, port)


def revoke(name: str, *, store: str, port: int) -> int:
    """Ends a key."""
    return _run(lambda book: book.revoke(name), store, port)


def limit(name: str, *, rpm: int, tpm: int, store: str, port: int) -> int:
    """Replaces a key's limits."""
    return _run(lambda book: book.set_limits(name, Limits(rpm, tpm)), store, port)


def _run(work: Callable[[KeyBook], Awaitable[None]], url: str, port: int) -> int:
    """`work` on the store of `url`, or on that of the local mesh on `port`. When it cannot be done, says why: 2 for wrong usage, else 1."""

    async def on_store() -> None:
        store = open_store(url or _of_local_mesh(port))
        try:
            await work(KeyBook(store))
        finally:
            await store.close()

    try:
        asyncio.run(on_store())
    except (TokenloomError, StoreError, ValueError) as error:
        print(f"tokenloom keys: {error}", file=sys.stderr)
        return 2 if isinstance(error, TokenloomError) and error.code is ErrorCode.INVALID_REQUEST else 1
    return 0


def _of_local_mesh(port: int) -> str:
    found = next((path for directory in candidates(port) if (path := directory / "store.db").is_file()), None)
    if found is None:
        message = f"no mesh has served on port {port} here; name its store with --store (or TOKENLOOM_STORE), or choose --port"
        raise TokenloomError(ErrorCode.UNAVAILABLE, message, param="--store")
    return str(found)
