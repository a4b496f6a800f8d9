"""Slots: what the worker remembers of each running sequence, a pure function of its `open` and of the results since.

A step is staged first and committed only when it has run, so that one that fails leaves every slot as it was:

    stage(batch)   reads slots, checks the rows, and says what would run (nothing changes but ids beyond a slot's own blocks)
    commit(...)    closes, opens, appends blocks, advances lengths, appends the sampled tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from libs.blocks import blocks_for
from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from services.worker.batch import Batch, Ids, Opening, Row
from services.worker.constraints.prepared import PreparedTable
from services.worker.constraints.progress import Progress
from services.worker.sampling.custom import CustomProcessor
from services.worker.sampling.steering import Steering, steer
from services.worker.spans import Timeline
from tokenloom.worker.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a batch must keep: ids of blocks and slots are below their numbers, lengths in tokens.

    `vocab_size`: ids with an embedding. `max_logprobs`: alternatives that log-probabilities may list.
    """

    num_slots: int
    num_blocks: int
    max_model_len: int
    max_tokens_per_step: int
    vocab_size: int
    max_logprobs: int = 0


@dataclass(slots=True)
class Slot:
    """One sequence: computed <= known <= capacity.

    tokens   prompt, then output; `known` of them are there, the first `computed` have their K and V in the blocks
    endings  ids that end the output (end of sequence unless ignored, stop ids); `ending_ids` are the same
    opened_with  tokens known at the opening: until the first token beyond them the slot is in its prefill
    progress  where the output stands in its constraint; None: it has none
    steering  what logits processors remember of it; None: it asks for none
    """

    request: str
    sampling: SamplingParams
    endings: Ids
    ending_ids: frozenset[int]
    tokens: Ids
    prompt_length: int
    opened_with: int
    known: int
    computed: int
    blocks: Ids
    num_blocks: int
    timeline: Timeline
    progress: Progress | None = None
    steering: Steering | None = None

    @property
    def prompt_ids(self) -> Ids:
        """The prompt; not to be written to."""
        return _read_only(self.tokens[: self.prompt_length])

    @property
    def output_ids(self) -> Ids:
        """The output so far; not to be written to."""
        return _read_only(self.tokens[self.prompt_length : self.known])

    @property
    def output_length(self) -> int:
        """Tokens of output so far."""
        return self.known - self.prompt_length

    @property
    def in_prefill(self) -> bool:
        """Whether it has sampled nothing since its opening."""
        return self.known == self.opened_with

    @property
    def full(self) -> bool:
        """Whether it has all the tokens it may have."""
        return self.known == self.tokens.size

    @property
    def ended(self) -> bool:
        """Whether its last token ends it, as far as the worker can tell (stop strings it cannot): a hint for leases."""
        return self.constraint_complete or self.ended_by_token

    @property
    def constraint_complete(self) -> bool:
        """Whether its constraint allows no further token."""
        return self.progress is not None and self.progress.complete

    @property
    def ended_by_token(self) -> bool:
        """Whether its last token is an end of sequence or a stop token that counts already."""
        if self.output_length < max(self.sampling.min_tokens, 1):
            return False
        return int(self.tokens[self.known - 1]) in self.ending_ids


@dataclass(frozen=True, slots=True)
class StagedRow:
    """A row that will run: tokens `start` .. `start + count` of its slot. `index`: its place in the batch."""

    index: int
    slot: Slot
    start: int
    count: int
    sample: bool
    num_blocks: int


@dataclass(slots=True)
class StagedStep:
    """What a step would do. `outcomes` has one RowOutcome per row of the batch: OK for those in `rows`."""

    closes: tuple[int, ...]
    opened: dict[int, Slot]
    rows: list[StagedRow] = field(default_factory=list)
    outcomes: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.count for row in self.rows)


class SlotTable:
    """All slots of a worker."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: Sequence[int],
        processors: Sequence[CustomProcessor] = (),
        *,
        constraints: PreparedTable | None = None,
    ) -> None:
        """`processors`: the operator's, which each opening is asked to take part in; `constraints`: what openings may name."""
        self._limits = limits
        self._processors = processors
        self._eos = tuple(eos_token_ids)
        self._constraints = constraints
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, slot: int) -> Slot | None:
        """The sequence in a slot; None: it is empty."""
        return self._slots.get(slot)

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> list[Slot]:
        """Empties every slot; returns what was there."""
        gone = list(self._slots.values())
        self._slots = {}
        return gone

    def stage(self, batch: Batch, *, skip_ended: bool = False) -> StagedStep:
        """What one step of `batch` would do. `skip_ended`: leave out rows that ended earlier in their lease.

        Raises TokenloomError(PROTOCOL_VIOLATION) for rows or openings that no correct scheduler sends.
        """
        staged = StagedStep(batch.closes, {opening.slot: self._open(opening) for opening in batch.opens})
        gone = set(batch.closes) - staged.opened.keys()
        for index, row in enumerate(batch.rows):
            slot = None if row.slot in gone else staged.opened.get(row.slot, self._slots.get(row.slot))
            ready = slot is not None and not (skip_ended and slot.ended) and self._add_row(staged, index, row, slot)
            staged.outcomes.append(worker_pb2.ROW_OUTCOME_OK if ready else worker_pb2.ROW_OUTCOME_NOT_RUN)
        if staged.tokens > self._limits.max_tokens_per_step:
            raise _violation(f"a step of {staged.tokens} tokens; the limit is {self._limits.max_tokens_per_step}")
        return staged

    def commit(self, staged: StagedStep, tokens: dict[int, int]) -> list[Slot]:
        """Makes the step's changes real. `tokens`: what each sampled row (by index in the batch) drew. Returns the sequences that left."""
        gone = [self._slots.pop(slot) for slot in (*staged.closes, *staged.opened) if slot in self._slots]
        self._slots.update(staged.opened)
        for row in staged.rows:
            slot = row.slot
            slot.num_blocks = row.num_blocks
            slot.computed = row.start + row.count
            if row.index in tokens:
                slot.tokens[slot.known] = tokens[row.index]
                slot.known += 1
                if slot.progress is not None:
                    slot.progress.accept(tokens[row.index])
                if slot.steering is not None:
                    slot.steering.advance(tokens[row.index])
        return gone

    def _open(self, opening: Opening) -> Slot:
        limits, known = self._limits, opening.prompt_ids.size + opening.output_ids.size
        if opening.slot >= limits.num_slots:
            raise _violation(f"slot {opening.slot} of {limits.num_slots}")
        if known > limits.max_model_len:
            raise _violation(f"{opening.request} opens with {known} tokens; the limit is {limits.max_model_len}")
        if max(opening.sampling.logprobs or 0, opening.sampling.prompt_logprobs or 0) > limits.max_logprobs:
            raise _violation(f"{opening.request} asks for more log-probabilities than the {limits.max_logprobs} that are listed here")
        capacity = min(limits.max_model_len, opening.prompt_ids.size + max(opening.sampling.max_tokens, opening.output_ids.size))
        tokens = np.zeros(capacity, np.int32)
        tokens[: opening.prompt_ids.size] = opening.prompt_ids
        tokens[opening.prompt_ids.size : known] = opening.output_ids
        if int(tokens.max()) >= limits.vocab_size:
            raise _violation(f"{opening.request} holds token id {int(tokens.max())}; the vocabulary has {limits.vocab_size}")
        blocks = np.zeros(blocks_for(limits.max_model_len), np.int32)
        if blocks_for(opening.computed_tokens) > opening.block_ids.size:
            raise _violation(f"{opening.request} opens with {opening.computed_tokens} computed tokens in {opening.block_ids.size} blocks")
        self._write_blocks(opening.request, blocks, 0, opening.block_ids)
        eos = () if opening.sampling.ignore_eos else self._eos
        endings = sorted({id for id in (*eos, *opening.sampling.stop_token_ids) if id < limits.vocab_size})
        return Slot(
            request=opening.request,
            sampling=opening.sampling,
            endings=np.asarray(endings, np.int32),
            ending_ids=frozenset(endings),
            tokens=tokens,
            prompt_length=opening.prompt_ids.size,
            opened_with=known,
            known=known,
            computed=opening.computed_tokens,
            blocks=blocks,
            num_blocks=opening.block_ids.size,
            timeline=Timeline(opening.trace, opening.decode_span_id, opening.request_span_id),
            progress=self._progress(opening),
            steering=steer(opening.sampling, opening.prompt_ids, opening.output_ids, self._processors),
        )

    def _progress(self, opening: Opening) -> Progress | None:
        if not opening.constraint_id:
            return None
        found = (
            self._constraints.progress(opening.constraint_id, ignore_eos=opening.sampling.ignore_eos, output=opening.output_ids.tolist())
            if self._constraints is not None
            else None
        )
        if found is None:
            raise _violation(f"{opening.request} opens with constraint {opening.constraint_id}, which is not prepared")
        return found

    def _add_row(self, staged: StagedStep, index: int, row: Row, slot: Slot) -> bool:
        """Adds a row to the step; False: its tokens are not there (an earlier row of it yielded none), or no further one has room."""
        start, end = slot.computed, slot.computed + row.count
        if end > slot.known or (row.sample and slot.full):
            return False
        if row.sample and end != slot.known:
            raise _violation(f"{slot.request} is to be sampled after token {end} of {slot.known}")
        if row.new_blocks.size:
            self._write_blocks(slot.request, slot.blocks, slot.num_blocks, row.new_blocks)
        num_blocks = slot.num_blocks + row.new_blocks.size
        if blocks_for(end) > num_blocks:
            raise _violation(f"{slot.request} has {num_blocks} blocks for {end} tokens")
        staged.rows.append(StagedRow(index, slot, start, row.count, row.sample, num_blocks))
        return True

    def _write_blocks(self, request: str, blocks: Ids, at: int, new: Ids) -> None:
        """Writes ids beyond the slot's own `at` blocks, where nothing is read until the step is committed."""
        if at + new.size > blocks.size:
            raise _violation(f"{request} gets {at + new.size} blocks; {blocks.size} hold the longest sequence")
        if new.size and int(new.max()) >= self._limits.num_blocks:
            raise _violation(f"{request} gets block {int(new.max())} of {self._limits.num_blocks}")
        blocks[at : at + new.size] = new


def _read_only(ids: Ids) -> Ids:
    ids.flags.writeable = False
    return ids


def _violation(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.PROTOCOL_VIOLATION, message)
