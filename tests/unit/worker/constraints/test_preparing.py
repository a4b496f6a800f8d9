"""What becomes of a prepare, over a real pool whose one process does as the constraint's text says."""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from libs.clock import SystemClock
from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode
from libs.helper_pool import HelperPool, Refusals
from services.worker.constraints.base import Grammar, Matcher
from services.worker.constraints.prepared import Constraints, PreparedTable
from services.worker.constraints.preparing import Preparer
from tokenloom.worker.v1 import worker_pb2

# Answers with the expression itself; refuses "bad" and, the first time only, hangs on "slow".
COMPILER = """
import os, sys, time
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.helper_frames import serve_frames
from tokenloom.common.v1 import common_pb2

def answer(payload):
    text = Constraint.from_proto(common_pb2.Constraint.FromString(payload)).text
    if text == "bad":
        raise TokenloomError(ErrorCode.INVALID_CONSTRAINT, "it is bad")
    if text == "slow" and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        time.sleep(600)
    return text.encode()

raise SystemExit(serve_frames(lambda: answer))
"""


@dataclass
class Text:
    """A grammar that is its text."""

    text: bytes
    size: int = 100

    def matcher(self) -> Matcher:
        raise AssertionError("nobody opens it")


@dataclass
class Backend:
    name: str = "texts"
    vocab_size: int = 8
    endings: tuple[int, ...] = (0,)
    loaded: list[bytes] = field(default_factory=list)

    def compile(self, constraint: Constraint) -> bytes:
        raise AssertionError("it is compiled in another process")

    def load(self, compiled: bytes) -> Grammar:
        self.loaded.append(compiled)
        if compiled == b"breaks":
            raise RuntimeError("a library's own")
        return Text(compiled)


@dataclass
class Desk:
    """A preparer and what it said."""

    preparer: Preparer
    backend: Backend
    table: PreparedTable
    outcomes: list[str]
    numbers: int = 0

    async def prepare(self, text: str) -> worker_pb2.Prepared:
        self.numbers += 1
        answered: asyncio.Future[worker_pb2.RunResponse] = asyncio.get_running_loop().create_future()
        constraint = Constraint(ConstraintKind.REGEX, (text,), param="structured_outputs.regex").to_proto()
        self.preparer.prepare(worker_pb2.Prepare(epoch=1, id=self.numbers, constraint=constraint), answered.set_result)
        return (await asyncio.wait_for(answered, 60)).prepared


@pytest.fixture
async def desk(tmp_path) -> AsyncIterator[Desk]:
    backend, table, outcomes = Backend(), PreparedTable(vocab_size=8, endings=(0,)), list[str]()
    refusals = Refusals("compiling", ErrorCode.CONSTRAINT_BUSY, ErrorCode.INVALID_CONSTRAINT, ErrorCode.INVALID_CONSTRAINT)
    pool = HelperPool(
        [sys.executable, "-c", COMPILER, str(tmp_path / "hung")],
        size=1,
        max_waiting=4,
        time_limit=2.0,
        refusals=refusals,
        clock=SystemClock(),
        observer=Silent(),
    )
    preparer = Preparer(pool, Constraints(backend, table), lambda outcome, _: outcomes.append(outcome))
    preparer.start()
    preparer.restart(1)
    yield Desk(preparer, backend, table, outcomes)
    await preparer.close()


class Silent:
    def size(self, running: int) -> None: ...

    def busy(self, change: int) -> None: ...

    def taken(self, queued_seconds: float) -> None: ...

    def replaced(self, reason: str) -> None: ...


async def test_what_compiles_is_kept_and_compiled_once_for_all_who_ask(desk):
    first, second = await asyncio.gather(desk.prepare("a"), desk.prepare("a"))
    third = await desk.prepare("a")
    assert not any(prepared.HasField("error") for prepared in (first, second, third))
    assert first.compile_us > 0
    assert third.compile_us == 0
    assert (desk.backend.loaded, len(desk.table)) == ([b"a"], 3)


async def test_a_refusal_names_the_parameter_and_gathers_nothing_however_often_it_is_given(desk):
    for _ in range(50):
        error = (await desk.prepare("bad")).error
        assert (error.code, error.message, error.param) == (ErrorCode.INVALID_CONSTRAINT.spec.code, "it is bad", "structured_outputs.regex")
    assert desk.outcomes == ["refused"] * 50
    gc.collect()
    kept = [found for found in gc.get_objects() if issubclass(type(found), BaseException) and "it is bad" in str(found)]
    assert sum(len(traceback.extract_tb(error.__traceback__)) for error in kept) < 50, "an exception that is raised anew grows each time"


async def test_a_constraint_that_was_slow_in_a_bad_moment_compiles_when_that_is_over(desk):
    refused = await desk.prepare("slow")
    assert refused.error.code == ErrorCode.INVALID_CONSTRAINT.spec.code
    assert "longer than 2 s" in refused.error.message
    assert not (await desk.prepare("slow")).HasField("error")


async def test_what_breaks_unforeseen_is_answered_too(desk, caplog):
    prepared = await desk.prepare("breaks")
    assert prepared.error.code == ErrorCode.INTERNAL.spec.code
    assert not (await desk.prepare("a")).HasField("error")


async def test_what_is_forgotten_while_it_compiles_is_not_put_into_the_table(desk):
    answered = asyncio.create_task(desk.prepare("a"))
    await asyncio.sleep(0)
    desk.preparer.forget(worker_pb2.Forget(epoch=1, ids=[1]))
    assert not (await answered).HasField("error")
    assert len(desk.table) == 0
