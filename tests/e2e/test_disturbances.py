"""Streams that lose the worker, the scheduler or only their session midway: a pause, and then exactly the tokens of a quiet run."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.mesh import Mesh, scrape
from tests.support.reference import Reference
from tests.support.session_proxy import ByteProxy
from tests.support.streams import Answer, Wish, ask, read_all

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
TEXTS = (
    "Once upon a time",
    "The capital of France is",
    "def quicksort(items):\n",
    "El telar es una máquina que",
    "1, 1, 2, 3, 5, 8,",
    "The",
)


@pytest.fixture(scope="module")
def wishes(model_dir: Path) -> list[Wish]:
    """Greedy and seeded in turn, of different lengths."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]
    return [Wish(prompt, 40 + 5 * number, seed=700 + number if number % 2 else None) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh, reference: Reference, wishes: list[Wish]) -> list[Answer]:
    """Each wish alone; the greedy ones are transformers' tokens."""
    answers = [ask(mesh.url, mesh.model, wish) for wish in wishes]
    for wish, answer in zip(wishes, answers, strict=True):
        assert len(answer.ids) == answer.completion_tokens == wish.count
        if wish.seed is None:
            reference.check(list(wish.prompt), list(answer.ids))
    return answers


async def disturb(
    url: str,
    model: str,
    wishes: list[Wish],
    undisturbed: list[Answer],
    disturbance: Callable[[], Awaitable[None]],
    resumed: Callable[[], float],
) -> None:
    """Streams the wishes while `disturbance` happens. Their answers must be the undisturbed ones, and `resumed` must have grown.

    Again, twice at most, where the machine was so busy that every stream was over before the disturbance came.
    """
    before = resumed()
    for _ in range(3):
        async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as client:
            readers = await read_all(client, model, wishes, meanwhile=disturbance)
        assert [reader.answer for reader in readers] == undisturbed
        if resumed() > before:
            return
    raise AssertionError("no request was ever resumed")


@pytest.mark.composes("worker loss", "greedy", "streaming")
@pytest.mark.composes("worker loss", "seed", "streaming")
async def test_a_worker_killed_in_mid_stream_costs_a_pause_and_no_token(mesh: Mesh, wishes: list[Wish], undisturbed: list[Answer]) -> None:
    async def kill() -> None:
        mesh.service("worker").send_signal(signal.SIGKILL)

    def resumed() -> float:
        return mesh.metrics("scheduler")["tokenloom:requests_resumed_total"]

    await disturb(mesh.url, mesh.model, wishes, undisturbed, kill, resumed)
    seen = await mesh.settle()
    assert seen["tokenloom:worker_losses_total"] >= 1
    assert seen["tokenloom:requests_failed_total"] == 0


@pytest.mark.composes("session loss", "greedy", "streaming")
@pytest.mark.composes("session loss", "seed", "streaming")
async def test_a_scheduler_killed_in_mid_stream_costs_a_pause_and_no_token(
    mesh: Mesh, wishes: list[Wish], undisturbed: list[Answer]
) -> None:
    async def kill() -> None:
        mesh.service("scheduler").send_signal(signal.SIGKILL)

    def resumed() -> float:
        return mesh.metrics("gateway")["tokenloom:gateway_resumed_requests_total"]

    await disturb(mesh.url, mesh.model, wishes, undisturbed, kill, resumed)
    assert mesh.metrics("gateway")["tokenloom:gateway_session_losses_total"] >= 1
    seen = await mesh.settle()
    assert seen["tokenloom:requests_admitted_total"] == seen["tokenloom:requests_finished_total"] >= 1


@pytest.mark.composes("session loss", "greedy", "streaming", "several gateways")
@pytest.mark.composes("session loss", "seed", "streaming", "several gateways")
async def test_a_session_cut_in_mid_stream_costs_a_pause_and_no_token(mesh: Mesh, wishes: list[Wish], undisturbed: list[Answer]) -> None:
    processes = [mesh.service(name).pid for name in ("scheduler", "worker")]
    before = await mesh.settle()
    async with ByteProxy(mesh.run_base / "proxy.sock", mesh.socket("scheduler")) as proxy, mesh.second_gateway(proxy.address) as url:

        async def cut() -> None:
            proxy.cut()

        def resumed() -> float:
            return scrape(f"{url}/metrics")["tokenloom:gateway_resumed_requests_total"]

        await disturb(url, mesh.model, wishes, undisturbed, cut, resumed)
        assert proxy.connections >= 2
    after = await mesh.settle()
    lost = 'tokenloom:request_cancelled_total{reason="session_lost"}'
    assert after[lost] > before.get(lost, 0)
    assert [mesh.service(name).pid for name in ("scheduler", "worker")] == processes
