"""What a decode step costs beside the model: work done in Python, calls and memory, counted, so that no clock and no neighbour matters.

A step here goes from staging to commit; reading the batch, writing the answer, metrics and spans are not in it.

A cost has a part for the step and a part for each of its rows, from steps of few and of many. Bounds of a row are what was counted and
little more, so that a loop over the rows fails; the others stand a fifth above. Lower them when something has become cheaper.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import core_speed
from libs.sampling import SamplingParams
from services.worker.engine import Engine, Executed
from services.worker.slots import SlotTable, StagedStep
from tests.unit.worker.helpers import batch, load_engine, opening, row

FEW, MANY = 8, 32
_ROOT = Path(core_speed.__file__).parents[1]
OWN_FOLDERS = tuple(f"{_ROOT / name}/" for name in ("bench", "libs", "services"))
PROMPT, BLOCKS_OF_A_ROW = 12, 4
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=64, temperature=0.0),
    "sampled": SamplingParams(max_tokens=64, temperature=0.8, top_p=0.9, top_k=20, seed=1),
}


@dataclass(frozen=True)
class Cost:
    """Of a step and of each of its rows."""

    step: float
    row: float

    def within(self, bound: Cost) -> bool:
        return self.step <= bound.step and self.row <= bound.row


# Bytecode instructions of this project's Python; calls that it makes, native ones included.
# Counted on Python 3.11; another version's compiler may need more of them.
COUNTED = sys.version_info[:2] == (3, 11)
ROW_INSTRUCTIONS, CORE_ROW_INSTRUCTIONS = (346, 675) if COUNTED else (460, 890)
INSTRUCTIONS = {"greedy": Cost(1700, ROW_INSTRUCTIONS), "sampled": Cost(2450, ROW_INSTRUCTIONS)}
CALLS = {"greedy": Cost(175, 13.5), "sampled": Cost(175, 13.5)}
CORE_INSTRUCTIONS, CORE_CALLS = Cost(1250, CORE_ROW_INSTRUCTIONS), Cost(105, 39)
# torch's operations, and bytes of the tensors that they make. A copy of a row's logits has 1,064 bytes here; the smallest
# product's weight has 8,192.
OPERATIONS = {"greedy": Cost(12, 0), "sampled": Cost(12, 0)}
TENSOR_BYTES = {"greedy": Cost(1024, 32), "sampled": Cost(1024, 32)}
# Python's and numpy's memory: most that a step holds at once, and what four steps may leave for later ones (caches grow a little).
HELD_BYTES = {"greedy": Cost(5000, 500), "sampled": Cost(9000, 500)}
LEFT_BYTES = 4096


class Decoding:
    """Rows of a tiny model that have their prompts behind them; `step` stages, executes and commits one token of each."""

    def __init__(self, engine: Engine, rows: int, sampling: SamplingParams) -> None:
        self._engine, self._rows = engine, rows
        self._slots = SlotTable(engine.limits, ())
        opens = [opening(slot, [3 + slot, *range(4, 3 + PROMPT)], sampling=sampling, blocks=self._blocks(slot)) for slot in range(rows)]
        self._batch = batch(*(row(slot) for slot in range(rows)))
        self._commit(*self._execute(self._slots.stage(batch(*(row(slot, PROMPT) for slot in range(rows)), opens=opens))))
        for _ in range(3):
            self.step()

    @staticmethod
    def _blocks(slot: int) -> range:
        return range(slot * BLOCKS_OF_A_ROW, (slot + 1) * BLOCKS_OF_A_ROW)

    def step(self) -> None:
        self._commit(*self._execute(self._slots.stage(self._batch)))

    def _execute(self, staged: StagedStep) -> tuple[StagedStep, Executed]:
        return staged, self._engine.execute(staged.rows)

    def _commit(self, staged: StagedStep, executed: Executed) -> None:
        assert len(executed.tokens) == self._rows
        self._slots.commit(staged, executed.tokens)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Engine:
    return load_engine(tiny_llama_dir, threads=1, max_num_seqs=MANY)


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """A collection runs finalizers of whatever other tests left, and frees memory, in the midst of a count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ours(frame: FrameType | None) -> bool:
    """Whether the code is this project's: what torch and numpy run in Python changes with their versions."""
    return frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS)


def instructions_and_calls(work: Callable[[], object]) -> tuple[int, int]:
    """Bytecode instructions of this project's Python that `work` runs, and calls that it makes of anything, native code included."""
    counted = {"opcode": 0, "calls": 0}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not ours(frame):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted[event] = counted.get(event, 0) + 1
        return trace

    def profile(frame: FrameType, event: str, __: Any) -> None:
        caller = frame.f_back if event == "call" else frame
        counted["calls"] += event in ("call", "c_call") and ours(caller)

    before = sys.gettrace(), sys.getprofile()
    try:
        sys.settrace(trace)
        work()
        sys.settrace(None)
        sys.setprofile(profile)
        work()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return counted["opcode"], counted["calls"]


class Allocated(TorchDispatchMode):
    """Counts torch's operations and the bytes of new tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {item.untyped_storage().data_ptr() for item in args if isinstance(item, torch.Tensor)}
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() not in known:
                self.bytes += item.nbytes
        self.operations += 1
        return result


def cost(few: float, many: float) -> Cost:
    """From what steps of FEW and of MANY rows took."""
    each = (many - few) / (MANY - FEW)
    return Cost(few - FEW * each, each)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_decode_step_runs_little_python_for_a_step_and_less_for_each_row(engine: Engine, kind: str):
    few, many = (instructions_and_calls(Decoding(engine, rows, SAMPLINGS[kind]).step) for rows in (FEW, MANY))
    instructions, calls = map(cost, few, many)
    assert instructions.within(INSTRUCTIONS[kind]), instructions
    assert calls.within(CALLS[kind]), calls


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_decode_step_copies_no_weight_and_makes_few_tensors(engine: Engine, kind: str):
    seen = []
    for rows in (FEW, MANY):
        decoding = Decoding(engine, rows, SAMPLINGS[kind])
        with torch.inference_mode(), Allocated() as allocated:
            decoding.step()
        seen.append(allocated)
    few, many = seen
    operations, made = cost(few.operations, many.operations), cost(few.bytes, many.bytes)
    assert operations.within(OPERATIONS[kind]), operations
    assert made.within(TENSOR_BYTES[kind]), made


def held_and_left(decoding: Decoding) -> tuple[int, int]:
    """Bytes of Python's and numpy's memory that a step holds at most, and what four steps leave. Other threads' count too."""
    tracemalloc.start()
    try:
        decoding.step()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            decoding.step()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - before, after - before


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_decode_step_leaves_no_memory_behind_and_takes_little(engine: Engine, kind: str):
    held = []
    for rows in (FEW, MANY):
        decoding = Decoding(engine, rows, SAMPLINGS[kind])
        # The least of several: a thread that another test left may allocate meanwhile.
        tries = [held_and_left(decoding) for _ in range(3)]
        assert min(left for _, left in tries) < LEFT_BYTES, f"{rows} rows"
        held.append(min(most for most, _ in tries))
    most = cost(*held)
    assert most.within(HELD_BYTES[kind]), most


def test_the_scheduler_core_runs_little_python_for_each_request():
    costs = []
    for running in (FEW, MANY):
        state, group = core_speed.make_state(running)
        for number in range(running):
            core_speed.submit(state, [number, *range(1, core_speed.PROMPT)], core_speed.OUTPUT)
        core_speed.plan(state, group, 1)
        for number in range(2, 8):
            core_speed.one_step(state, group, core_speed.Times(), number)
        costs.append(instructions_and_calls(partial(core_speed.one_step, state, group, core_speed.Times(), 9)))
    instructions, calls = map(cost, *costs)
    assert instructions.within(CORE_INSTRUCTIONS), instructions
    assert calls.within(CORE_CALLS), calls
