"""Constrained generation on an engine without server or stream, with unconstrained sequences beside.

Compiled as the compiler's process does, decoded through slots as the runner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from libs.blocks import BLOCK_SIZE, blocks_for
from libs.constraints import Constraint
from libs.sampling import SamplingParams
from services.worker.batch import Batch, Opening, Row
from services.worker.constraints.base import Backend
from services.worker.constraints.compiler_process import compile_one
from services.worker.constraints.prepared import PreparedConstraint, PreparedTable
from services.worker.engine import Engine
from services.worker.slots import SlotTable

_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with what its output must be; None: anything."""

    prompt: Sequence[int]
    sampling: SamplingParams
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Output ids, and how it ended: `complete`, `ended` (by a token), `dead`, or `length`."""

    ids: list[int]
    how: str


def grammar_of(backend: Backend, constraint: Constraint) -> PreparedConstraint:
    """What a worker makes of a constraint. Raises TokenloomError as compile_one."""
    compiled = compile_one(backend, constraint.to_proto().SerializeToString())
    return PreparedConstraint(backend.load(compiled), constraint.begin_after)


class ConstrainedRun:
    """Runs tasks together on an engine, at most as many at once as it has slots; each gets the blocks of its longest output at once."""

    def __init__(self, engine: Engine, backend: Backend) -> None:
        self.engine, self.backend = engine, backend
        self.table = PreparedTable(vocab_size=engine.facts.vocab_size, endings=engine.facts.eos_token_ids)
        self.table.restart(1)
        self._number = 0

    def run(self, tasks: Sequence[Task], *, at_once: int) -> list[Outcome]:
        """The outcomes, in the order of the tasks."""
        slots = SlotTable(self.engine.limits, tuple(self.engine.facts.eos_token_ids), constraints=self.table)
        waiting, running = list(range(len(tasks)))[::-1], dict[int, int]()
        outcomes: list[Outcome | None] = [None] * len(tasks)
        closes: list[int] = []
        while waiting or running:
            opens, rows = [], [Row(slot, 1, True, _NO_IDS) for slot in running]
            for slot in [slot for slot in range(at_once) if slot not in running][: len(waiting)]:
                running[slot] = waiting.pop()
                opens.append(self._opening(slot, running[slot] + 1, tasks[running[slot]]))
                rows.append(Row(slot, len(tasks[running[slot]].prompt), True, _NO_IDS))
            self._number += 1
            staged = slots.stage(Batch(1, self._number, 0, 1, tuple(closes), tuple(opens), tuple(rows)))
            executed = self.engine.execute(staged.rows)
            slots.commit(staged, executed.tokens)
            closes = []
            for index, row in enumerate(rows):
                how = self._ended(slots, row.slot, index in executed.tokens)
                if how:
                    state = slots[row.slot]
                    assert state is not None
                    outcomes[running.pop(row.slot)] = Outcome(state.output_ids.tolist(), how)
                    closes.append(row.slot)
            closes = [slot for slot in closes if slot not in {opening.slot for opening in opens} or slot not in running]
        assert all(outcome is not None for outcome in outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _opening(self, slot: int, number: int, task: Task) -> Opening:
        if task.constraint is not None:
            self.table.put(1, number, grammar_of(self.backend, task.constraint))
        needed = blocks_for(len(task.prompt) + task.sampling.max_tokens)
        first = slot * blocks_for(self.engine.limits.max_model_len)
        blocks = np.arange(first, first + needed, dtype=np.int32)
        assert blocks[-1] < self.engine.limits.num_blocks, f"give the cache more than {self.engine.limits.num_blocks * BLOCK_SIZE} tokens"
        prompt = np.asarray(task.prompt, np.int32)
        opening = Opening(slot, f"r{number}", prompt, _NO_IDS, 0, blocks, task.sampling)
        return replace(opening, constraint_id=number if task.constraint is not None else 0)

    def _ended(self, slots: SlotTable, slot: int, drawn: bool) -> str:
        state = slots[slot]
        assert state is not None
        if not drawn:
            return "dead"
        if state.ended_by_token:
            return "ended"
        return "complete" if state.constraint_complete else "length" if state.full else ""
