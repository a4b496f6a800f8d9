"""What the worker's tests share: openings, batches and a loop that decodes through slots and engine as the runner does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from libs.blocks import blocks_for
from libs.sampling import SamplingParams
from services.worker.batch import Batch, Opening, Row
from services.worker.config import WorkerConfig
from services.worker.engine import Engine, load
from services.worker.slots import Limits, SlotTable

LIMITS = Limits(num_slots=8, num_blocks=64, max_model_len=128, max_tokens_per_step=256, vocab_size=100)
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
NO_IDS = np.empty(0, np.int32)


def ids(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def opening(
    slot: int,
    prompt: Sequence[int],
    *,
    output: Sequence[int] = (),
    blocks: Sequence[int] = (),
    computed: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Opening:
    return Opening(slot, f"r{slot}", ids(prompt), ids(output), computed, ids(blocks), sampling, None, 0)


def row(slot: int, count: int = 1, *, sample: bool = True, blocks: Sequence[int] = ()) -> Row:
    return Row(slot, count, sample, ids(blocks))


def batch(*rows: Row, opens: Sequence[Opening] = (), closes: Sequence[int] = (), number: int = 1, lease_steps: int = 1) -> Batch:
    return Batch(1, number, 0, lease_steps, tuple(closes), tuple(opens), tuple(rows))


def load_engine(model: Path, **options: object) -> Engine:
    defaults: dict[str, object] = {"kv_cache_memory_bytes": 64 << 20, "threads": 2}
    return load(WorkerConfig.model_validate({"model": model, **defaults, **options}))


class Driver:
    """Runs steps on an engine, with blocks dealt out in a shuffled order."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.slots = SlotTable(engine.limits, tuple(engine.facts.eos_token_ids))
        self._free = list(np.random.default_rng(seed).permutation(engine.limits.num_blocks))
        self._held: dict[int, int] = {}
        self._number = 0

    def step(self, rows: Sequence[tuple[int, int, bool]], opens: Sequence[Opening] = (), closes: Sequence[int] = ()) -> dict[int, int]:
        """Rows are (slot, count, sample); returns the token drawn by each sampled slot."""
        lengths = {item.slot: 0 for item in opens}
        for slot in lengths:
            self._held[slot] = 0
        staged_rows = []
        for slot, count, sample in rows:
            state = self.slots[slot] if slot not in lengths else None
            start = state.computed if state is not None else 0
            need = blocks_for(start + count) - self._held[slot]
            staged_rows.append(row(slot, count, sample=sample, blocks=[self._free.pop() for _ in range(need)]))
            self._held[slot] += need
        self._number += 1
        staged = self.slots.stage(batch(*staged_rows, opens=opens, closes=closes, number=self._number))
        executed = self.engine.execute(staged.rows)
        self.slots.commit(staged, executed.tokens)
        return {rows[index][0]: token for index, token in executed.tokens.items()}

    def generate(
        self, prompts: dict[int, Sequence[int]], steps: int, *, chunk: int = 10_000, sampling: SamplingParams = GREEDY
    ) -> dict[int, list[int]]:
        """Prefills all prompts in chunks, all at once, then decodes; each slot's output."""
        outputs: dict[int, list[int]] = {slot: [] for slot in prompts}
        opens = [opening(slot, prompt, sampling=sampling) for slot, prompt in prompts.items()]
        done = dict.fromkeys(prompts, 0)
        while any(len(output) < steps for output in outputs.values()):
            rows = []
            for slot, prompt in prompts.items():
                if done[slot] < len(prompt):
                    count = min(chunk, len(prompt) - done[slot])
                    done[slot] += count
                    rows.append((slot, count, done[slot] == len(prompt)))
                elif len(outputs[slot]) < steps:
                    rows.append((slot, 1, True))
            for slot, token in self.step(rows, opens).items():
                outputs[slot].append(token)
            opens = []
        return outputs
