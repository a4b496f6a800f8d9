"""One sequence followed through an engine: in chunks, in company, behind blocks of another request, preempted. Its logits are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from libs.blocks import BLOCK_SIZE, blocks_for
from services.worker.batch import Opening
from services.worker.engine import Engine
from services.worker.slots import SlotTable
from services.worker.step_inputs import build_inputs
from tests.unit.worker.helpers import batch, opening, row

OUTPUTS = 4
BUDGET = 1024  # tokens of a step
_DONOR = 40


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
        donor = company.open(_DONOR, [*prompt[: shared * BLOCK_SIZE], 5])
        while donor.left and not donor.output:
            company.advance([_DONOR, *others[::3]], drive.most)
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


def assert_same_bits(engines: dict[int, Engine], drive: Drive) -> None:
    """That each of the sequence's logits is what it is for the sequence alone, whole, with one thread. `engines`: by number of threads."""
    prompt = np.random.default_rng(drive.length).integers(3, engines[1].limits.vocab_size, drive.length).tolist()
    expected = follow(engines[1], prompt, Drive(drive.length, [], 0, None, BUDGET, 1, 0))
    actual = follow(engines[drive.threads], prompt, drive)
    assert len(actual) == len(expected) == OUTPUTS
    for output, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(ours, theirs), f"logits of output {output} differ by {float((ours - theirs).abs().max())}"
