"""A gateway before a real scheduler, whose workers model block contents: from HTTP to the ledger and back, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.sampling import SamplingParams
from services.scheduler.core.stopping import StopRules
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_fakes import FakeTokenizer
from tests.support.gateway_process import Gateway, running_gateway, until
from tests.support.model_worker import EOS, VOCABULARY, expected_output, text_table
from tests.support.scheduler_mesh import SchedulerMesh

MAX_MODEL_LEN = 256


class _Scheduler:
    """What running_gateway starts and stops: a scheduler with one worker. Stopping it checks that nothing was left behind."""

    def __init__(self, mesh: SchedulerMesh, **worker: Any) -> None:
        self.mesh = mesh
        self._worker = worker
        self.worker: FakeWorker | None = None

    async def start(self, _address: str) -> str:
        await self.mesh.__aenter__()
        self.worker = await self.mesh.worker(**self._worker)
        return self.mesh.config.listen

    async def stop(self) -> None:
        await self.mesh.__aexit__(None, None, None)


@dataclass
class Stack:
    """The running parts."""

    gateway: Gateway
    mesh: SchedulerMesh
    worker: FakeWorker

    async def lose_session(self) -> None:
        """Ends the gateway's session, by a newer one in its name; returns when it has opened another."""
        name = "tokenloom:gateway_session_losses_total"
        registry = self.gateway.mesh.metrics.registry
        before = registry.get_sample_value(name) or 0.0
        await self.mesh.session(gateway=self.gateway.mesh.session.instance)
        await until(lambda: (registry.get_sample_value(name) or 0.0) > before and self.gateway.mesh.session.up)

    async def complete(self, prompt: Sequence[int] | Sequence[Sequence[int]], **fields: Any) -> dict[str, Any]:
        """A completion of token ids that must succeed: 8 tokens whatever they are, unless `fields` say otherwise."""
        body = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **fields}
        response = await self.gateway.complete(list(prompt), **body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def spell(text: str) -> list[int]:
    """The ids of a text in the model's small vocabulary, none of them the end of sequence."""
    return [1 + byte % (VOCABULARY - 1) for byte in text.encode()]


def cached_of(body: dict[str, Any]) -> int:
    """The cached prompt tokens that a response tells of."""
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def expected(prompt: Sequence[int], *, max_tokens: int = 8, seed: int = 0) -> list[int]:
    """The tokens that the model's completion of `prompt` has."""
    rules = StopRules((EOS,), MAX_MODEL_LEN, text_table())
    return expected_output(rules, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))


@contextlib.asynccontextmanager
async def running_stack(
    folder: Path, *, worker: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None, **scheduler: Any
) -> AsyncIterator[Stack]:
    """Gateway, scheduler and one worker; `worker` and `gateway` are their settings, the rest the scheduler's."""
    sockets = folder / "mesh"
    sockets.mkdir()
    core = _Scheduler(SchedulerMesh(sockets, **scheduler), **{"max_model_len": MAX_MODEL_LEN, **(worker or {})})
    async with running_gateway(folder, core, _tokenizer(), **(gateway or {})) as running:  # type: ignore[arg-type]
        assert core.worker is not None
        yield Stack(running, core.mesh, core.worker)


@contextlib.asynccontextmanager
async def joined_gateway(folder: Path, stack: Stack, **config: Any) -> AsyncIterator[Gateway]:
    """One more gateway of the same scheduler."""
    async with running_gateway(folder, _Elsewhere(stack.mesh), _tokenizer(), **config) as running:  # type: ignore[arg-type]
        yield running


class _Elsewhere:
    """A scheduler that somebody else starts and stops."""

    def __init__(self, mesh: SchedulerMesh) -> None:
        self._mesh = mesh

    async def start(self, _address: str) -> str:
        return self._mesh.config.listen

    async def stop(self) -> None:
        """Nothing to do."""


def _tokenizer() -> FakeTokenizer:
    tokenizer = FakeTokenizer()
    tokenizer.table, tokenizer.spell = text_table(), spell
    return tokenizer
