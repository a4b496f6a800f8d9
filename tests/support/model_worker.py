"""A worker that models block contents: it writes token ids into blocks and checks every read.

Its "language model" is a hash of all tokens so far, so that one wrong id, position or block anywhere changes every later token, and the
right output of a request is a pure function of its prompt and parameters (`expected_output`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from libs.blocks import BLOCK_SIZE
from libs.packing import pack_ids
from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.scheduler.core.plan import BatchOutcome, PlannedOpen, PlannedRow, RowOutcome, StepOutcome, StepPlan, StepTimings
from services.scheduler.core.stopping import StopRules, StopTracker

VOCABULARY = 40
EOS = 0


def text_table() -> TextTable:
    """40 ids: 0 is the end of sequence, the others spell one letter each."""
    tokens = (b"<eos>", *(bytes([96 + (i % 26) + 1]) for i in range(VOCABULARY - 1)))
    classes = bytes([TokenClass.SPECIAL, *([TokenClass.TEXT] * (VOCABULARY - 1))])
    return TextTable("table", tokens, classes, TextRule.BYTE_LEVEL, verified=True)


def next_token(tokens: Sequence[int], outputs: int, params: SamplingParams) -> int:
    """The model: a hash of everything before and the seed; below min_tokens the end of sequence is masked."""
    digest = blake2b(pack_ids(tokens) + params.seed.to_bytes(8, "little"), digest_size=4).digest()
    token = int.from_bytes(digest, "little") % VOCABULARY
    return token + 1 if token == EOS and outputs < params.min_tokens else token


def expected_output(rules: StopRules, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What the request must yield if nobody cancels it."""
    stops, outputs = StopTracker(rules, params, len(prompt)), list[int]()
    while True:
        outputs.append(next_token([*prompt, *outputs], len(outputs), params))
        if stops.push(outputs[-1], outputs):
            return outputs


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    prompt: int
    length: int
    blocks: list[int]
    params: SamplingParams

    def copy(self) -> _Slot:
        return _Slot(list(self.tokens), self.prompt, self.length, list(self.blocks), self.params)


class BlockContentError(AssertionError):
    """A row read a position that does not hold the token it should."""


@dataclass
class ModelWorker:
    """One worker group as a model; `run` executes a plan as a worker would."""

    num_blocks: int
    num_slots: int
    epoch: int = 1
    blocks: list[list[int | None]] = field(default_factory=list)
    slots: dict[int, _Slot] = field(default_factory=dict)
    completed: int = 0

    def __post_init__(self) -> None:
        self.blocks = [[None] * BLOCK_SIZE for _ in range(self.num_blocks)]

    def run(self, plan: StepPlan, *, fail: bool = False) -> StepOutcome:
        """Runs a plan if its predecessor completed; `fail`: it breaks halfway and leaves slots as they were, block contents undefined."""
        if plan.epoch != self.epoch or (plan.predecessor and plan.predecessor != self.completed):
            return StepOutcome(plan.epoch, plan.number, BatchOutcome.NOT_RUN)
        before = {index: slot.copy() for index, slot in self.slots.items()}
        for slot in plan.closes:
            self.slots.pop(slot, None)
        for entry in plan.opens:
            self._open(entry)
        tokens = [self._row(row) for row in plan.rows]
        if fail:
            self.slots = before
            return StepOutcome(plan.epoch, plan.number, BatchOutcome.FAILED)
        self.completed = plan.number
        rows = [RowOutcome.OK] * len(tokens)
        return StepOutcome(plan.epoch, plan.number, BatchOutcome.OK, rows, tokens, timings=StepTimings(forward_us=1000, total_us=1100))

    def _open(self, entry: PlannedOpen) -> None:
        request, residency = entry.request, entry.residency
        assert residency.slot < self.num_slots
        tokens = [*request.prompt_ids, *request.output_ids]
        slot = _Slot(tokens, len(request.prompt_ids), entry.computed, list(entry.blocks), request.sampling)
        assert entry.computed < len(tokens), "the last known token must be computed"
        self._check_read(slot, entry.computed)
        self.slots[residency.slot] = slot

    def _row(self, row: PlannedRow) -> list[int]:
        slot = self.slots[row.residency.slot]
        assert row.start == slot.length, f"row starts at {row.start}, the slot ends at {slot.length}"
        slot.blocks.extend(row.new_blocks)
        end = row.start + row.count
        assert end <= len(slot.tokens), "a row computes tokens that nobody knows"
        assert len(set(slot.blocks)) == len(slot.blocks), "a block stands twice in a block table"
        for position in range(row.start, end):
            self.blocks[slot.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = slot.tokens[position]
        self._check_read(slot, end)
        slot.length = end
        if not row.sample:
            return []
        assert end == len(slot.tokens), "a row samples before its last known token"
        slot.tokens.append(next_token(slot.tokens, len(slot.tokens) - slot.prompt, slot.params))
        return [slot.tokens[-1]]

    def _check_read(self, slot: _Slot, end: int) -> None:
        held = itertools.chain.from_iterable(self.blocks[block] for block in slot.blocks)
        if list(itertools.islice(held, end)) != slot.tokens[:end]:
            raise BlockContentError(f"blocks {slot.blocks} do not hold the first {end} tokens")
