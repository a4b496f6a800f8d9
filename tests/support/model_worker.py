"""A worker that models block contents: it writes token ids into blocks and checks every read.

Its "language model" is a hash of all tokens so far, so that one wrong id, position or block anywhere changes every later token, and the
right output of a request is a pure function of its prompt and parameters (`expected_output`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from libs.blocks import BLOCK_SIZE
from libs.constraints import Constraint
from libs.errors import TokenloomError
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.scheduler.core.stopping import StopRules, StopTracker
from tests.support.logprobs import told_all
from tests.support.model_constraints import constrained, is_complete
from tokenloom.common.v1 import common_pb2
from tokenloom.worker.v1 import worker_pb2

# Outcomes of rows whose blocks hold what they should.
_COMPUTED = (worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE, worker_pb2.ROW_OUTCOME_DEAD_END)
VOCABULARY = 40
EOS = 0


def text_table() -> TextTable:
    """40 ids: 0 is the end of sequence, the others spell one letter each."""
    tokens = (b"<eos>", *(bytes([96 + (i % 26) + 1]) for i in range(VOCABULARY - 1)))
    classes = bytes([TokenClass.SPECIAL, *([TokenClass.TEXT] * (VOCABULARY - 1))])
    return TextTable("table", tokens, classes, TextRule.BYTE_LEVEL, verified=True)


def next_token(tokens: Sequence[int], outputs: int, params: SamplingParams, constraint: Constraint | None = None) -> int:
    """The model: a hash of everything before and the seed; below min_tokens the end of sequence is masked, and a constraint has the last
    word."""
    digest = blake2b(pack_ids(tokens) + params.seed.to_bytes(8, "little"), digest_size=4).digest()
    token = int.from_bytes(digest, "little") % VOCABULARY
    token = token + 1 if token == EOS and outputs < params.min_tokens else token
    return token if constraint is None else constrained(constraint, tokens[len(tokens) - outputs :], token, VOCABULARY, EOS)


def expected_output(rules: StopRules, prompt: Sequence[int], params: SamplingParams, constraint: Constraint | None = None) -> list[int]:
    """What the request must yield if nobody cancels it."""
    stops, outputs = StopTracker(rules, params, len(prompt)), list[int]()
    while True:
        outputs.append(next_token([*prompt, *outputs], len(outputs), params, constraint))
        if stops.push(outputs[-1], outputs) or (constraint is not None and is_complete(constraint, outputs)):
            return outputs


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    prompt: int
    length: int
    blocks: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    spoiled: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether its constraint allows nothing more."""
        return self.constraint is not None and is_complete(self.constraint, self.tokens[self.prompt :])

    @property
    def ended(self) -> bool:
        """Whether its last token ends it as far as a worker can tell."""
        if self.is_complete:
            return True
        outputs = len(self.tokens) - self.prompt
        endings = {*self.params.stop_token_ids, *(() if self.params.ignore_eos else (EOS,))}
        return outputs >= max(1, self.params.min_tokens) and self.tokens[-1] in endings

    def copy(self) -> _Slot:
        return _Slot(list(self.tokens), self.prompt, self.length, list(self.blocks), self.params, self.constraint, self.spoiled)


class BlockContentError(AssertionError):
    """A row read a position that does not hold the token it should."""


@dataclass
class ModelWorker:
    """One worker group as a model; `run` executes a batch as a worker would; `steps` has each one's (rows, tokens). `compiled`: constraints
    that opens may name."""

    num_blocks: int
    num_slots: int
    epoch: int = 1
    blocks: list[list[int | None]] = field(default_factory=list)
    slots: dict[int, _Slot] = field(default_factory=dict)
    completed: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    compiled: dict[int, Constraint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = [[None] * BLOCK_SIZE for _ in range(self.num_blocks)]

    def compile(self, ask: worker_pb2.Prepare, error: TokenloomError | None = None) -> worker_pb2.Prepared:
        """Answers an ask: the constraint is there from now on, or there is an `error` about it."""
        answer = worker_pb2.Prepared(epoch=ask.epoch, id=ask.id, compile_us=1000)
        if error is not None:
            answer.error.CopyFrom(error.to_proto())
        else:
            self.compiled[ask.id] = Constraint.from_proto(ask.constraint)
        return answer

    def forget(self, ids: Sequence[int]) -> None:
        """Constraints that no later open names."""
        for ask in ids:
            self.compiled.pop(ask, None)

    def run(
        self,
        batch: worker_pb2.StepBatch,
        *,
        fail: bool = False,
        refuse: bool = False,
        spoil: int | None = None,
        outcome: int = worker_pb2.ROW_OUTCOME_FAILED,
        error: TokenloomError | None = None,
        later: bool = False,
    ) -> worker_pb2.StepResult:
        """Runs a batch if its predecessor completed.

        `later`: it is not the first step of its lease: rows that have ended since are skipped.

        `fail`: it breaks halfway (for `error`, if that is told) and leaves slots as they were, block contents undefined. `refuse`: it is
        not run for a reason of the worker's own. `spoil`: that row (modulo their number) ends with `outcome`; from then on its slot yields
        rubbish that claims to be well. A row that draws no token cannot end at a constraint: it stays ok.
        """
        result = worker_pb2.StepResult(epoch=batch.epoch, number=batch.number)
        if refuse or batch.epoch != self.epoch or (batch.predecessor and batch.predecessor != self.completed):
            result.outcome = worker_pb2.BATCH_OUTCOME_NOT_RUN
            return result
        before = {index: slot.copy() for index, slot in self.slots.items()}
        for slot in batch.closes:
            self.slots.pop(slot, None)
        for entry in batch.opens:
            self._open(entry)
        skipped = {i for i, slot in enumerate(batch.slots) if later and self.slots[slot].ended and not self.slots[slot].spoiled}
        spoilt = self._spoilt_row(batch, spoil, outcome)
        spoilt = None if spoilt in skipped else spoilt
        if spoilt is not None and outcome not in _COMPUTED:
            self.slots[batch.slots[spoilt]].spoiled = True
        tokens = self._rows(batch, skipped)
        if fail:
            self._scramble(batch)
            self.slots = before
            result.outcome = worker_pb2.BATCH_OUTCOME_FAILED
            if error is not None:
                result.error.CopyFrom(error.to_proto())
            return result
        self.completed = batch.number
        self.steps.append((len(tokens), sum(batch.counts)))
        result.outcome = worker_pb2.BATCH_OUTCOME_OK
        if spoilt is not None:
            self.slots[batch.slots[spoilt]].spoiled = True
            if outcome != worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE:
                tokens[spoilt] = []
        done = [i for i, slot in enumerate(batch.slots) if tokens[i] and not self.slots[slot].spoiled and self.slots[slot].is_complete]
        complete = dict.fromkeys(done, worker_pb2.ROW_OUTCOME_CONSTRAINT_COMPLETE)
        outcomes = {**complete, **dict.fromkeys(skipped, worker_pb2.ROW_OUTCOME_NOT_RUN), spoilt: outcome}
        result.row_outcomes = bytes(outcomes.get(index, worker_pb2.ROW_OUTCOME_OK) for index in range(len(tokens)))
        result.token_counts.extend(len(row) for row in tokens)
        result.token_ids = pack_ids(itertools.chain.from_iterable(tokens))
        self._tell(result, batch, tokens, skipped)
        result.timings.forward_us, result.timings.total_us = 1000, 1100
        return result

    def _tell(self, result: worker_pb2.StepResult, batch: worker_pb2.StepBatch, tokens: list[list[int]], skipped: Collection[int]) -> None:
        """Log-probabilities of what was drawn and of prompts, for rows that ask."""
        for index, (number, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            slot, drawn = self.slots[number], tokens[index]
            asked, wanted = slot.params.logprobs, slot.params.prompt_logprobs
            own = told_all(len(slot.tokens) - len(drawn), drawn, asked).to_proto() if asked is not None and drawn else None
            result.logprobs.append(own or common_pb2.Logprobs())
            start, end = slot.length - count, min(slot.length + 1, slot.prompt)
            first = start + 1 if start else 0
            if wanted is not None and first < end and index not in skipped:
                told = told_all(first, slot.tokens[first:end], wanted)
                result.prompt_positions.add(row=index, first_position=first, logprobs=told.to_proto())
        if not any(entry.ranks for entry in result.logprobs):
            del result.logprobs[:]

    @staticmethod
    def _spoilt_row(batch: worker_pb2.StepBatch, spoil: int | None, outcome: int) -> int | None:
        if spoil is None or not batch.slots:
            return None
        row = spoil % len(batch.slots)
        return row if batch.samples[row] or outcome not in _COMPUTED else None

    def _scramble(self, batch: worker_pb2.StepBatch) -> None:
        """What a broken batch leaves in the blocks that it wrote."""
        for index, count in zip(batch.slots, batch.counts, strict=True):
            slot = self.slots[index]
            for position in range(slot.length - count, slot.length):
                self.blocks[slot.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = None

    def _open(self, entry: worker_pb2.Open) -> None:
        assert entry.slot < self.num_slots
        prompt = unpack_ids(entry.prompt_ids)
        tokens = [*prompt, *unpack_ids(entry.output_ids)]
        params = SamplingParams.from_proto(entry.sampling)
        assert not entry.constraint_id or entry.constraint_id in self.compiled, "an open names a constraint that is not there"
        constraint = self.compiled[entry.constraint_id] if entry.constraint_id else None
        slot = _Slot(tokens, len(prompt), entry.computed_tokens, unpack_ids(entry.block_ids), params, constraint)
        assert entry.computed_tokens < len(tokens), "the last known token must be computed"
        self._check_read(slot, entry.computed_tokens)
        self.slots[entry.slot] = slot

    def _rows(self, batch: worker_pb2.StepBatch, skipped: Collection[int] = ()) -> list[list[int]]:
        assert len(set(batch.slots)) == len(batch.slots), "a slot stands twice in a batch"
        fresh = iter(unpack_ids(batch.new_block_ids))
        rows = zip(batch.slots, batch.counts, batch.samples, batch.new_block_counts, strict=True)
        return [
            [] if index in skipped else self._row(slot, count, bool(sample), list(itertools.islice(fresh, new)))
            for index, (slot, count, sample, new) in enumerate(rows)
        ]

    def _row(self, index: int, count: int, sample: bool, new_blocks: list[int]) -> list[int]:
        slot = self.slots[index]
        slot.blocks.extend(new_blocks)
        end = slot.length + count
        if slot.spoiled:
            return self._rubbish(slot, end, sample)
        assert end <= len(slot.tokens), "a row computes tokens that nobody knows"
        assert len(set(slot.blocks)) == len(slot.blocks), "a block stands twice in a block table"
        for position in range(slot.length, end):
            self.blocks[slot.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = slot.tokens[position]
        self._check_read(slot, end)
        slot.length = end
        if not sample:
            return []
        assert end == len(slot.tokens), "a row samples before its last known token"
        slot.tokens.append(next_token(slot.tokens, len(slot.tokens) - slot.prompt, slot.params, slot.constraint))
        return [slot.tokens[-1]]

    def _rubbish(self, slot: _Slot, end: int, sample: bool) -> list[int]:
        for position in range(slot.length, end):
            self.blocks[slot.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = None
        slot.length = end
        return [VOCABULARY - 1] if sample else []

    def _check_read(self, slot: _Slot, end: int) -> None:
        held = itertools.chain.from_iterable(self.blocks[block] for block in slot.blocks)
        if list(itertools.islice(held, end)) != slot.tokens[:end]:
            raise BlockContentError(f"blocks {slot.blocks} do not hold the first {end} tokens")
