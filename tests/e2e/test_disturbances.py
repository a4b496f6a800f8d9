"""Streams that lose the worker, the scheduler or only their session midway: a pause, and then exactly the tokens of a quiet run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.support.mesh import PATIENT, Mesh, scrape
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
# Long enough to be lost in the middle.
NAMES = {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 16}, "minItems": 5, "maxItems": 6}
SENTENCE = "[A-Z][a-z ]{80,100}[.]"
EXPRESSION = json.dumps({"structured_outputs": {"regex": SENTENCE}})
STEERED = json.dumps({"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25, "bad_words": ["the"], "logprobs": 2})


@dataclass(frozen=True, slots=True)
class Quiet:
    """Wishes, and what each got alone."""

    wishes: list[Wish]
    answers: list[Answer]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Mesh]:
    mesh = Mesh.start(tmp_path_factory.mktemp("disturbed"), *PATIENT)
    yield mesh
    assert mesh.stop() == 0


@pytest.fixture(scope="module")
def quiet(mesh: Mesh, reference: Reference, model_dir: Path) -> Quiet:
    """Greedy and seeded in turn, of different lengths, one of them with three choices; the greedy ones are transformers' tokens.

    Two more end at a stop string that stands late in what the first two said, and three are held to something or steered.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]
    wishes = [Wish(prompt, 40 + 5 * number, seed=700 + number if number % 2 else None) for number, prompt in enumerate(prompts)]
    wishes[3] = replace(wishes[3], n=3)
    answers = [ask(mesh.url, mesh.model, wish) for wish in wishes]
    for wish, answer in zip(wishes, answers, strict=True):
        assert sum(len(choice.ids) for choice in answer.choices) == answer.completion_tokens == wish.count * wish.n
        if wish.seed is None:
            reference.check(list(wish.prompt), list(answer.ids))
    for wish, answer in list(zip(wishes, answers, strict=True))[:2]:
        text = answer.choices[0].text
        wishes.append(replace(wish, stop=text[-len(text) // 3 :][:8]))
        answers.append(ask(mesh.url, mesh.model, wishes[-1]))
        assert answers[-1].choices[0].finish_reason == "stop"
    for number, more in enumerate((json.dumps({"structured_outputs": {"json": NAMES}}), EXPRESSION, STEERED)):
        wishes.append(Wish(prompts[number], 120, seed=None if number == 0 else 900 + number, n=2 if number == 1 else 1, more=more))
        answers.append(ask(mesh.url, mesh.model, wishes[-1]))
    names, sentence, _ = answers[-3:]
    jsonschema.validate(json.loads(names.choices[0].text), NAMES)
    assert all(re.fullmatch(SENTENCE, choice.text) for choice in sentence.choices)
    assert sentence.choices[0] != sentence.choices[1]
    return Quiet(wishes, answers)


async def disturb(
    url: str,
    model: str,
    quiet: Quiet,
    disturbance: Callable[[], Awaitable[None]],
    resumed: Callable[[], float],
) -> None:
    """Streams the wishes while `disturbance` happens. Their answers must be those of the quiet run, and `resumed` must have grown.

    Again, twice at most, where the machine was so busy that every stream was over before the disturbance came.
    """
    before = resumed()
    for _ in range(3):
        async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as client:
            readers = await read_all(client, model, quiet.wishes, meanwhile=disturbance)
        assert [reader.answer for reader in readers] == quiet.answers
        if resumed() > before:
            return
    raise AssertionError("no request was ever resumed")


@pytest.mark.composes("worker loss", "n", "seed", "streaming", "structured output")
@pytest.mark.composes("worker loss", "penalties", "token bias", "logprobs", "seed", "streaming")
@pytest.mark.composes("worker loss", "greedy", "stop strings", "streaming")
@pytest.mark.composes("worker loss", "seed", "stop strings", "streaming")
async def test_a_worker_killed_in_mid_stream_costs_a_pause_and_no_token(mesh: Mesh, quiet: Quiet) -> None:
    async def kill() -> None:
        mesh.service("worker").send_signal(signal.SIGKILL)

    def resumed() -> float:
        return mesh.metrics("scheduler")["tokenloom:requests_resumed_total"]

    await disturb(mesh.url, mesh.model, quiet, kill, resumed)
    seen = await mesh.settle()
    assert seen["tokenloom:worker_losses_total"] >= 1
    assert seen["tokenloom:requests_failed_total"] == 0


@pytest.mark.composes("session loss", "n", "seed", "streaming", "structured output")
@pytest.mark.composes("session loss", "penalties", "token bias", "logprobs", "seed", "streaming")
@pytest.mark.composes("session loss", "greedy", "stop strings", "streaming")
@pytest.mark.composes("session loss", "seed", "stop strings", "streaming")
async def test_a_scheduler_killed_in_mid_stream_costs_a_pause_and_no_token(mesh: Mesh, quiet: Quiet) -> None:
    async def kill() -> None:
        mesh.service("scheduler").send_signal(signal.SIGKILL)

    def resumed() -> float:
        return mesh.metrics("gateway")["tokenloom:gateway_resumed_requests_total"]

    await disturb(mesh.url, mesh.model, quiet, kill, resumed)
    assert mesh.metrics("gateway")["tokenloom:gateway_session_losses_total"] >= 1
    seen = await mesh.settle()
    assert seen["tokenloom:requests_admitted_total"] == seen["tokenloom:requests_finished_total"] >= 1


@pytest.mark.composes("session loss", "n", "seed", "streaming", "several gateways", "structured output")
@pytest.mark.composes("session loss", "greedy", "stop strings", "streaming", "several gateways")
@pytest.mark.composes("session loss", "seed", "stop strings", "streaming", "several gateways")
async def test_a_session_cut_in_mid_stream_costs_a_pause_and_no_token(mesh: Mesh, quiet: Quiet) -> None:
    processes = [mesh.service(name).pid for name in ("scheduler", "worker")]
    before = await mesh.settle()
    async with (
        ByteProxy(mesh.run_base / "proxy.sock", mesh.socket("scheduler")) as proxy,
        mesh.second_gateway(proxy.address, PATIENT[0]) as url,
    ):

        async def cut() -> None:
            proxy.cut()

        def resumed() -> float:
            return scrape(f"{url}/metrics")["tokenloom:gateway_resumed_requests_total"]

        await disturb(url, mesh.model, quiet, cut, resumed)
        assert proxy.connections >= 2
    after = await mesh.settle()
    lost = 'tokenloom:request_cancelled_total{reason="session_lost"}'
    assert after[lost] > before.get(lost, 0)
    assert [mesh.service(name).pid for name in ("scheduler", "worker")] == processes
