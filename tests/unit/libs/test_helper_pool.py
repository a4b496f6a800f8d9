"""A pool of helper processes: answers, refusals, and processes that hang or die."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from libs.clock import SystemClock
from libs.errors import ErrorCode, TokenloomError
from libs.helper_pool import HelperPool, Refusals

# Answers in capitals; refuses, hangs, dies or grows when asked to.
HELPER = """
import os, time
from libs.errors import ErrorCode, TokenloomError
from libs.helper_frames import limit_memory, serve_frames

def answer(payload):
    match payload:
        case b"refuse":
            raise TokenloomError(ErrorCode.INVALID_CONSTRAINT, "no")
        case b"hang":
            time.sleep(600)
        case _ if payload.startswith(b"wait "):
            while not os.path.exists(payload[5:]):
                time.sleep(0.01)
        case b"die":
            os._exit(3)
        case b"nice":
            return str(os.nice(0)).encode()
        case b"grow":
            try:
                return bytes(1 << 30)[:0]
            except MemoryError:
                raise TokenloomError(ErrorCode.INVALID_CONSTRAINT, "too much memory")
    print("what a library prints breaks no frame")
    return payload.upper()

def load():
    limit_memory(64 << 20)
    return answer

raise SystemExit(serve_frames(load))
"""
REFUSALS = Refusals("asking", ErrorCode.CONSTRAINT_BUSY, ErrorCode.INVALID_CONSTRAINT, ErrorCode.INVALID_CONSTRAINT)
WAIT = 30.0


@dataclass
class Observer:
    running: int = 0
    working: int = 0
    reasons: list[str] = field(default_factory=list)

    def size(self, running: int) -> None:
        self.running = running

    def busy(self, change: int) -> None:
        self.working += change

    def taken(self, queued_seconds: float) -> None:
        assert queued_seconds >= 0

    def replaced(self, reason: str) -> None:
        self.reasons.append(reason)


def pool_of(
    observer: Observer, *, time_limit: float = WAIT, max_waiting: int = 8, size: int = 1, script: str = HELPER, nice: int = 0
) -> HelperPool:
    return HelperPool(
        [sys.executable, "-c", script],
        size=size,
        max_waiting=max_waiting,
        time_limit=time_limit,
        refusals=REFUSALS,
        clock=SystemClock(),
        observer=observer,
        long_after=0.2,
        nice=nice,
    )


@pytest.fixture
async def observer() -> Observer:
    return Observer()


@pytest.fixture
async def pool(observer: Observer) -> AsyncIterator[HelperPool]:
    pool = pool_of(observer)
    await pool.start()
    yield pool
    await pool.close()


async def refusal(pool: HelperPool, payload: bytes) -> TokenloomError:
    with pytest.raises(TokenloomError) as caught:
        await asyncio.wait_for(pool.ask(payload), WAIT)
    return caught.value


async def test_answers_refusals_and_limits_of_memory_leave_the_process_as_it_is(pool: HelperPool, observer: Observer):
    pids = pool.pids
    assert (await pool.ask(b"abc")).payload == b"ABC"
    assert (await refusal(pool, b"refuse")).message == "no"
    assert (await refusal(pool, b"grow")).message == "too much memory"
    assert (await pool.ask(b"again")).worked_us > 0
    assert (pool.pids, observer.reasons, observer.working) == (pids, [], 0)


async def test_processes_and_those_that_replace_them_stand_behind_their_owner(observer: Observer):
    pool = pool_of(observer, nice=3)
    await pool.start()
    behind = str(os.nice(0) + 3).encode()
    assert (await pool.ask(b"nice")).payload == behind
    await refusal(pool, b"die")
    assert (await pool.ask(b"nice")).payload == behind
    await pool.close()


async def test_a_question_on_which_two_processes_die_is_refused_and_the_next_is_answered(pool: HelperPool, observer: Observer):
    error = await refusal(pool, b"die")
    assert error.code is ErrorCode.INVALID_CONSTRAINT
    assert "two processes" in error.message
    assert (await pool.ask(b"next")).payload == b"NEXT"
    assert (observer.reasons, observer.running) == (["died", "died"], 1)


async def test_a_question_that_hangs_is_refused_in_time_and_its_process_replaced(observer: Observer):
    pool = pool_of(observer, time_limit=0.3)
    await pool.start()
    error = await refusal(pool, b"hang")
    assert error.code is ErrorCode.INVALID_CONSTRAINT
    assert "longer than 0.3 s" in error.message
    assert observer.reasons == ["timeout"]
    await pool.close()


async def test_what_is_asked_before_the_start_waits_and_beyond_the_bound_is_refused(observer: Observer):
    pool = pool_of(observer, max_waiting=1)
    first = asyncio.create_task(pool.ask(b"first"))
    await asyncio.sleep(0)
    assert (await refusal(pool, b"second")).code is ErrorCode.CONSTRAINT_BUSY
    await pool.start()
    assert (await asyncio.wait_for(first, WAIT)).payload == b"FIRST"
    await pool.close()


async def test_who_leaves_takes_the_question_out_of_its_process(pool: HelperPool, observer: Observer):
    leaving = asyncio.create_task(pool.ask(b"hang"))
    async with asyncio.timeout(WAIT):
        while not observer.working:
            await asyncio.sleep(0.01)
        leaving.cancel()
        assert (await pool.ask(b"next")).payload == b"NEXT"
    assert observer.reasons == ["abandoned"]


@pytest.fixture
async def pair(observer: Observer) -> AsyncIterator[HelperPool]:
    """A pool of two processes."""
    pool = pool_of(observer, size=2)
    await pool.start()
    yield pool
    await pool.close()


@pytest.mark.parametrize(("known", "reasons"), [(True, []), (False, ["yielded"])])
async def test_long_questions_known_as_such_or_not_leave_a_process_to_short_ones(
    pair: HelperPool, observer: Observer, tmp_path: Path, known: bool, reasons: list[str]
):
    wait = f"wait {tmp_path / 'go'}".encode()
    async with asyncio.timeout(WAIT):
        held = [asyncio.create_task(pair.ask(wait, long=known)) for _ in range(3)]
        while observer.working < (1 if known else 2):
            await asyncio.sleep(0.01)
        assert (await pair.ask(b"short")).payload == b"SHORT"
        (tmp_path / "go").touch()
        assert [answer.payload for answer in await asyncio.gather(*held)] == [wait.upper()] * 3
    assert set(observer.reasons) == set(reasons)


async def test_a_long_question_has_its_turn_among_short_ones(observer: Observer):
    pool, order = pool_of(observer), list[bytes]()

    async def ask(payload: bytes, *, long: bool = False) -> None:
        order.append((await pool.ask(payload, long=long)).payload)

    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(ask(b"%d" % number))
        tasks.create_task(ask(b"long", long=True))
        await asyncio.sleep(0)
        await pool.start()
    await pool.close()
    assert order == [b"0", b"1", b"2", b"3", b"LONG", b"4", b"5"]


async def test_a_process_that_cannot_start_is_an_error_of_the_start(observer: Observer):
    pool = pool_of(observer, script="raise SystemExit(1)")
    with pytest.raises(TokenloomError, match="asking cannot start"):
        await pool.start()


async def test_what_waits_at_the_end_is_refused(observer: Observer):
    pool = pool_of(observer)
    waiting = asyncio.create_task(pool.ask(b"x"))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(TokenloomError) as caught:
        await waiting
    assert caught.value.code is ErrorCode.DRAINING
