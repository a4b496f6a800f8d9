"""The two ways to load a server: a closed loop of clients that wait for their answers, and an open loop that does not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from bench.stream import RequestRecord

Send = Callable[[bytes, RequestRecord], Awaitable[None]]


async def closed_loop(send: Send, bodies: Sequence[bytes], concurrency: int) -> list[RequestRecord]:
    """Keeps `concurrency` requests in flight until all bodies are sent; each is due when the one before it on its client ended."""
    records: list[RequestRecord] = []
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:  # one iterator for all clients
            record = RequestRecord(due=time.perf_counter())
            records.append(record)
            await send(body, record)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(bodies))):
            clients.create_task(client())
    return records


async def open_loop(send: Send, bodies: Sequence[bytes], arrivals: Sequence[float]) -> list[RequestRecord]:
    """Sends each body at its arrival (seconds from now), however many are in flight; late or not, its times count from the arrival."""
    start = time.perf_counter()
    records = [RequestRecord(due=start + arrival) for arrival in arrivals]
    async with asyncio.TaskGroup() as requests:
        for body, record in zip(bodies, records, strict=True):
            await asyncio.sleep(record.due - time.perf_counter())
            requests.create_task(_send(send, body, record))
    return records


async def _send(send: Send, body: bytes, record: RequestRecord) -> None:
    await send(body, record)
