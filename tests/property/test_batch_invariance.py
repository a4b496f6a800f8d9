"""PROTOCOL.md rule 15 on the engine: a sequence's logits have the same bits whatever happens to it and whoever is with it.

Each drive follows one sequence, through chunks of any sizes, beside up to 31 others, behind blocks that another request has computed, with
preemption and recomputation, for teams of 1 to 3 threads, and compares every one of its logits with those of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.blocks import BLOCK_SIZE, blocks_for
from libs.errors import TokenloomError
from services.worker.batch import Opening
from services.worker.engine import Engine
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.native import VARIANT_ENV, CpuLibrary
from services.worker.slots import SlotTable
from services.worker.step_inputs import build_inputs
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import batch, load_engine, opening, row

OUTPUTS = 4
LONGEST = 600  # three spans of attention, and a part of a stretch
BUDGET = 1024
THREADS = (1, 2, 3)
# What --quantization may say: each has kernels of its own.
OPTIONS: tuple[dict[str, str], ...] = ({},)


@dataclass(frozen=True)
class Drive:
    """What happens to a sequence of `length` tokens. `others`: lengths of those beside it; `shared`: blocks that another request computed;
    `preempted`: after so many outputs it loses its blocks; `most`: tokens of a chunk.
    """

    length: int
    others: Sequence[int]
    shared: int
    preempted: int | None
    most: int
    threads: int
    seed: int


drives = st.builds(
    Drive,
    length=st.integers(2, LONGEST),
    others=st.lists(st.one_of(st.integers(1, 40), st.integers(250, 300)), max_size=31),
    shared=st.integers(0, LONGEST // BLOCK_SIZE),
    preempted=st.one_of(st.none(), st.integers(0, OUTPUTS - 1)),
    most=st.sampled_from([1, 7, 16, 63, 64, 150, LONGEST]),
    threads=st.sampled_from(THREADS),
    seed=st.integers(0, 2**16),
)


@dataclass
class Member:
    """One of a company: `prompt`, what came out, its blocks, how many of its tokens are computed."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.prompt) + len(self.output) - self.computed


class Company:
    """Sequences in the slots of one engine. `told`: logits of the first, for each token that it was given."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.told: list[torch.Tensor] = []
        self._engine = engine
        self._slots = SlotTable(engine.limits, ())
        self._free = self.random.permutation(engine.limits.num_blocks).tolist()
        self._members: dict[int, Member] = {}
        self._opens: list[Opening] = []

    def open(self, slot: int, prompt: list[int], *, output: Sequence[int] = (), prefix: Sequence[int] = ()) -> Member:
        """`prefix`: blocks in which the prompt's first tokens lie already."""
        own = blocks_for(len(prompt) + OUTPUTS) - len(prefix)
        blocks = [*prefix, *(self._free.pop() for _ in range(own))]
        member = Member(prompt, list(output), blocks, len(prefix) * BLOCK_SIZE)
        self._members[slot] = member
        self._opens.append(opening(slot, prompt, output=output, blocks=blocks, computed=member.computed))
        return member

    def step(self, counts: dict[int, int]) -> None:
        """Computes so many tokens of each slot; those that come to their end are given the next, the likeliest."""
        rows = [row(slot, count, sample=count == self._members[slot].left) for slot, count in counts.items()]
        staged = self._slots.stage(batch(*rows, opens=self._opens))
        self._opens = []
        logits = self._engine.step(build_inputs(staged.rows))
        drawn = [index for index, item in enumerate(rows) if item.sample]
        tokens = dict(zip(drawn, logits.argmax(dim=1).tolist(), strict=True))
        if rows[0].slot == 0 and 0 in tokens:
            self.told.append(logits[0].clone())
        self._slots.commit(staged, tokens)
        for index, (slot, count) in enumerate(counts.items()):
            self._members[slot].computed += count
            self._members[slot].output += [tokens[index]] if index in tokens else []

    def advance(self, slots: Sequence[int], most: int) -> None:
        """A step of some of the slots' tokens, at most so many of each."""
        room, counts = BUDGET, {}
        for slot in slots:
            left = min(self._members[slot].left, most, room)
            if left and len(self._members[slot].output) < OUTPUTS:
                counts[slot] = int(self.random.integers(1, left + 1))
                room -= counts[slot]
        if counts:
            self.step(counts)


def follow(engine: Engine, prompt: list[int], drive: Drive) -> list[torch.Tensor]:
    """Logits of the sequence's outputs, as it goes through the drive."""
    company = Company(engine, drive.seed)
    vocabulary, random = engine.limits.vocab_size, np.random.default_rng(drive.seed)
    others = list(range(1, len(drive.others) + 1))
    for slot, length in zip(others, drive.others, strict=True):
        company.open(slot, random.integers(3, vocabulary, length).tolist())
    shared = min(drive.shared, (len(prompt) - 1) // BLOCK_SIZE)
    prefix: list[int] = []
    if shared:
        donor = company.open(40, [*prompt[: shared * BLOCK_SIZE], 5])
        while donor.left and not donor.output:
            company.advance([40, *others[::3]], drive.most)
        prefix = donor.blocks[:shared]
    followed = company.open(0, prompt, prefix=prefix)
    preempted = drive.preempted
    while len(followed.output) < OUTPUTS:
        if preempted == len(followed.output) and followed.computed > len(prefix) * BLOCK_SIZE:
            preempted = None
            followed = company.open(0, prompt, output=followed.output)
        beside = [slot for slot in others if random.random() < 0.7]
        company.advance([0, *beside], drive.most)
    return company.told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module", params=["avx512", "avx2", "generic"])
def variant(request: pytest.FixtureRequest) -> str:
    try:
        return CpuLibrary(ensure_library(), request.param).variant
    except TokenloomError:
        pytest.skip(f"this CPU has no {request.param}")


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def engines(request: pytest.FixtureRequest, model: Path, variant: str) -> dict[int, Engine]:
    """The same model for teams of several sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIANT_ENV, variant)
        options = {"max_num_seqs": 64, "max_num_batched_tokens": BUDGET, **request.param}
        return {threads: load_engine(model, threads=threads, **options) for threads in THREADS}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drive=drives)
def test_logits_have_the_bits_that_they_have_alone(engines: dict[int, Engine], drive: Drive):
    prompt = np.random.default_rng(drive.length).integers(3, 272, drive.length).tolist()
    alone = Drive(drive.length, [], 0, None, BUDGET, 1, 0)
    expected = follow(engines[1], prompt, alone)
    actual = follow(engines[drive.threads], prompt, drive)
    assert len(actual) == len(expected) == OUTPUTS
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
