"""How long the scheduler's core takes per step: planning, applying, and the conversion to and from the wire.

    python -m bench.core_speed [--running 256 2048] [--steps 200] [--profile]

All requests decode, each in every step, with a 300-token prompt and blocks that fill every 16 steps; the worker is replaced by ready
answers. Milliseconds per step: median and 99th percentile. Targets: plan + apply under 1 ms at 256 running requests, under 8 ms at 2,048.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from dataclasses import dataclass, field

from libs.blocks import BLOCK_SIZE, block_hashes, blocks_for
from libs.packing import pack_ids
from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.scheduler.convert import from_result, to_batch
from services.scheduler.core.apply import apply
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.request import Request, RequestKey, Timeline
from services.scheduler.core.state import Group, Limits, SchedulerState
from services.scheduler.core.stopping import StopRules, StopTracker
from tokenloom.worker.v1 import worker_pb2

PROMPT, OUTPUT, VOCABULARY = 300, 2000, 1000
TARGET_MS = {256: 1.0, 2048: 8.0}


@dataclass(slots=True)
class Times:
    """Seconds of each step's parts."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)

    def summary(self, running: int) -> str:
        """One line for people."""
        core = [first + second for first, second in zip(self.plan, self.apply, strict=True)]
        parts = (("plan", self.plan), ("apply", self.apply), ("plan + apply", core), ("wire", self.wire))
        text = "   ".join(f"{name} {_ms(times, 0.5):.2f} / {_ms(times, 0.99):.2f}" for name, times in parts)
        return f"{running:>5} running: {text} ms (median / p99)"

    @property
    def core_ms(self) -> float:
        """Median of plan + apply, in milliseconds."""
        return statistics.median(first + second for first, second in zip(self.plan, self.apply, strict=True)) * 1e3


def _ms(times: list[float], quantile: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * quantile))] * 1e3


def make_state(running: int) -> tuple[SchedulerState, Group]:
    """A group with room for all, and `running` requests that wait."""
    length = PROMPT + OUTPUT
    limits = Limits(max_tokens_per_step=8192, max_sequences=running, max_requests=running, max_model_len=length)
    state = SchedulerState(limits)
    table = TextTable("bench", tuple(b"x" for _ in range(VOCABULARY)), bytes([TokenClass.TEXT] * VOCABULARY), TextRule.BYTE_LEVEL)
    rules = StopRules((0,), length, table)
    blocks = running * (blocks_for(PROMPT) + 40)
    group = state.groups["bench"] = Group.new("bench", 1, num_blocks=blocks, num_slots=running)
    for number in range(1, running + 1):
        prompt = [number % VOCABULARY, *range(1, PROMPT - number % BLOCK_SIZE)]  # so that blocks fill at different steps
        params = SamplingParams(max_tokens=OUTPUT)
        request = Request(
            RequestKey(1, number), 0, state.next_arrival(), prompt, params, StopTracker(rules, params, len(prompt)), Timeline(received_ns=1)
        )
        request.block_names = block_hashes(prompt)
        request.cacheable = True
        state.accept(request)
    return state, group


def answer(step: StepPlan, token: int) -> worker_pb2.StepResult:
    """What a worker would say: one token for each row that samples."""
    sampled = sum(row.sample for row in step.rows)
    return worker_pb2.StepResult(
        epoch=step.epoch,
        number=step.number,
        outcome=worker_pb2.BATCH_OUTCOME_OK,
        row_outcomes=bytes([worker_pb2.ROW_OUTCOME_OK]) * len(step.rows),
        token_counts=[int(row.sample) for row in step.rows],
        token_ids=pack_ids([token] * sampled),
        timings=worker_pb2.StepTimings(forward_us=1000, total_us=1000),
    )


def one_step(state: SchedulerState, group: Group, times: Times, number: int) -> bool:
    """Plans a batch behind the one in flight, then applies that one, as dispatch-ahead does; False when nothing could be planned."""
    begin = time.perf_counter()
    step = plan(state, group, number)
    planned = time.perf_counter()
    head = group.in_flight[0]
    if step is not None:
        to_batch(step, lambda _: None)
    sent = time.perf_counter()
    result = answer(head, 1 + number % (VOCABULARY - 1))
    received = time.perf_counter()
    outcome = from_result(result)
    converted = time.perf_counter()
    apply(state, group, outcome, number)
    times.apply.append(time.perf_counter() - converted)
    times.plan.append(planned - begin)
    times.wire.append((sent - planned) + (converted - received))
    return step is not None


def measure(running: int, steps: int) -> Times:
    """Fills the group, then times `steps` decode steps."""
    state, group = make_state(running)
    plan(state, group, 1)
    warm = Times()
    number = 2
    while len(group.running) < running or any(not request.output_ids for request in group.running):
        one_step(state, group, warm, number)
        number += 1
    gc.collect()
    times = Times()
    for turn in range(steps):
        one_step(state, group, times, number + turn)
    state.check()
    if any(len(request.output_ids) < steps // 2 for request in group.running) or len(group.running) != running:
        raise RuntimeError(f"not all requests advanced: {len(group.running)} of {running} run")
    return times


def main() -> int:
    """Prints one line per size; the exit code is the number of missed targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=list(TARGET_MS))
    parser.add_argument("--steps", type=int, default=10 * BLOCK_SIZE)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, by function")
    args = parser.parse_args()
    missed = 0
    for running in args.running:
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times = measure(running, args.steps)
        profile.disable()
        target = TARGET_MS.get(running)
        missed += target is not None and times.core_ms > target
        print(times.summary(running), "" if target is None else f"   target {target:g} ms: {'missed' if times.core_ms > target else 'met'}")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
