"""The storm: 64 clients at once in a cache of an eighth of what they want, a third of them leaves, the worker is killed in between.

Who stays gets exactly the tokens of a quiet run, the scheduler's books balance at every moment, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from libs.blocks import BLOCK_SIZE, blocks_for
from tests.support.mesh import BLOCK_BYTES, PATIENT, Mesh, scrape
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference
from tests.support.streams import PATIENCE, Answer, Reader, Wish, ask

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]
CLIENTS = 64
BLOCKS = 40
# Seconds between two looks at the metrics.
LOOK = 0.05
SERVICES = ("gateway", "scheduler", "worker", "tokenizer")
PREEMPTIONS = 'tokenloom:num_preemptions_total{reason="no_blocks"}'
COUNTED = {
    "preemptions": PREEMPTIONS,
    "prefix hits": "tokenloom:prefix_cache_hits_total",
    "mixed steps": "tokenloom:scheduler_mixed_steps_total",
    "resumptions": "tokenloom:requests_resumed_total",
    "worker losses": "tokenloom:worker_losses_total",
}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Mesh]:
    mesh = Mesh.start(tmp_path_factory.mktemp("storm"), f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}", *PATIENT)
    yield mesh
    assert mesh.stop() == 0


@pytest.fixture(scope="module")
def wishes(model_dir: Path) -> list[Wish]:
    """25 wishes, greedy and seeded in turn: four heads of two blocks, tails of 3 to 15 tokens, three of 80, outputs of 16 to 48."""
    text, count = PROMPTS[-1]
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:count]
    heads = [ids[start : start + 2 * BLOCK_SIZE] for start in (0, 200, 400, 600)]
    found = []
    for number in range(25):
        tail = ids[800 + 17 * number :][: 3 + number % 13 if number % 12 else 80]
        found.append(Wish((*heads[number % 4], *tail), 16 + 5 * number % 33, seed=number if number % 2 else None))
    return found


@dataclass(slots=True)
class Watch:
    """Looks at the scheduler's metrics again and again; at each look its books must balance. `seen` is the last one."""

    url: str
    seen: dict[str, float] = field(default_factory=dict)
    looks: int = 0
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        while True:
            seen = await asyncio.to_thread(scrape, self.url)
            check_books(seen)
            async with self._news:
                self.seen, self.looks = seen, self.looks + 1
                self._news.notify_all()
            await asyncio.sleep(LOOK)

    async def until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        async with self._news:
            await self._news.wait_for(lambda: condition(self.seen))


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watch]:
    """A Watch at work; leaving ends it. What it finds wrong fails the block."""
    watch = Watch(url)
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(watch.run())
        yield watch
        looking.cancel()


def check_books(seen: dict[str, float]) -> None:
    """Conservation of requests and of blocks, as of one instant."""
    live = seen["tokenloom:num_requests_live"]
    ended = [seen[f"tokenloom:requests_{how}_total"] for how in ("finished", "failed", "cancelled")]
    assert seen["tokenloom:requests_admitted_total"] == sum(ended) + live, seen
    assert live == seen["tokenloom:num_requests_running"] + seen["tokenloom:num_requests_waiting"], seen
    blocks = sum(seen[f'tokenloom:kv_blocks{{state="{state}"}}'] for state in ("held", "draining", "cached", "free"))
    assert blocks in (BLOCKS, 0), seen  # 0: no worker is attached


def left_behind(mesh: Mesh) -> dict[str, float]:
    """What must be zero on a quiet mesh and is not."""
    wanted = {
        "gateway": ("gateway_open_streams", 'gateway_outstanding{unit="sequences"}', 'gateway_outstanding{unit="tokens"}'),
        "scheduler": ("num_requests_running", "num_requests_waiting", 'kv_blocks{state="held"}', 'kv_blocks{state="draining"}'),
        "worker": ("worker_slots_used",),
    }
    values = {}
    for service, names in wanted.items():
        seen = mesh.metrics(service)
        values |= {name: seen[f"tokenloom:{name}"] for name in names}
    return {name: value for name, value in values.items() if value}


def sizes(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Open files and threads of each service."""
    processes = {name: mesh.service(name) for name in SERVICES}
    return {name: (process.num_fds(), process.num_threads()) for name, process in processes.items()}


async def until_quiet(mesh: Mesh, before: dict[str, tuple[int, int]]) -> None:
    """Waits until nothing is left behind and no service has grown beyond `before` by more than a few files and threads."""
    left: dict[str, float] = {}
    grown: dict[str, tuple[int, int]] = {}
    try:
        async with asyncio.timeout(30):
            while True:
                left, now = left_behind(mesh), sizes(mesh)
                grown = {name: now[name] for name in SERVICES if any(n > b + 8 for n, b in zip(now[name], before[name], strict=True))}
                if not left and not grown:
                    return
                await asyncio.sleep(LOOK)
    except TimeoutError:
        raise AssertionError(f"left behind: {left}; grown: {grown}, before: {before}") from None


async def rage(mesh: Mesh, wishes: list[Wish]) -> tuple[list[Reader], dict[str, float]]:
    """64 clients at once; every third leaves after 2 to 6 tokens. The worker is killed once somebody was preempted.

    Returns the readers, all at their ends, and what the scheduler's metrics said at the kill.
    """
    readers = [Reader(wishes[number % len(wishes)]) for number in range(CLIENTS)]
    model, before, worker = mesh.model, mesh.metrics("scheduler")[PREEMPTIONS], mesh.service("worker")

    async def kill(watch: Watch) -> dict[str, float]:
        await watch.until(lambda seen: seen.get(PREEMPTIONS, 0) > before)
        worker.send_signal(signal.SIGKILL)
        return watch.seen

    async with asyncio.timeout(2 * PATIENCE), watching(mesh.metrics_url("scheduler")) as watch, mesh.client() as client:
        killer = asyncio.create_task(kill(watch))
        try:
            async with asyncio.TaskGroup() as group:
                for number, reader in enumerate(readers):
                    group.create_task(reader.read(client, model, leave_after=None if number % 3 else 2 + number % 5))
            assert killer.done(), f"nobody was preempted: {watch.seen}"
        finally:
            killer.cancel()
    assert watch.looks > 10
    return readers, await killer


@pytest.mark.composes("worker loss", "preemption", "prefix caching", "chunked prefill", "cancel", "dispatch-ahead", "greedy", "streaming")
@pytest.mark.composes("worker loss", "preemption", "prefix caching", "chunked prefill", "cancel", "dispatch-ahead", "seed", "streaming")
async def test_the_storm(crowded: Mesh, wishes: list[Wish], reference: Reference) -> None:
    mesh = crowded
    demand = sum(blocks_for(len(wish.prompt) + wish.count) for wish in (wishes[number % len(wishes)] for number in range(CLIENTS)))
    assert demand >= 8 * BLOCKS
    quiet: list[Answer] = [ask(mesh.url, mesh.model, wish) for wish in wishes]
    for wish, answer in zip(wishes, quiet, strict=True):
        if wish.seed is None:
            reference.check(list(wish.prompt), list(answer.ids))
    before, small = await mesh.settle(), sizes(mesh)

    readers, at_kill = await rage(mesh, wishes)

    for number, reader in enumerate(readers):
        expected = quiet[number % len(wishes)]
        if number % 3:
            assert reader.answer == expected, f"client {number}"
        else:
            assert tuple(reader.ids) == expected.ids[: len(reader.ids)], f"client {number}, who left"
    await until_quiet(mesh, small)
    after = await mesh.settle()
    check_books(after)
    gained = {what: after[name] - before[name] for what, name in COUNTED.items()}
    assert all(gained.values()), gained
    assert after["tokenloom:requests_resumed_total"] > at_kill["tokenloom:requests_resumed_total"]
    assert after["tokenloom:requests_admitted_total"] - before["tokenloom:requests_admitted_total"] == CLIENTS
    assert after["tokenloom:requests_failed_total"] == 0
    assert after["tokenloom:requests_cancelled_total"] > 0
    assert [ask(mesh.url, mesh.model, wish) for wish in wishes[:2]] == quiet[:2]
