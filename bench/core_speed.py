"""How long the scheduler's core takes per step: planning, applying, and the conversion to and from the wire.

    python -m bench.core_speed [--running 256 2048] [--steps 200] [--profile]

Cases, with prompts of about 300 tokens; the worker is replaced by ready answers:

    steady decode     every request decodes in every step, and blocks fill every 16 steps
    all admitted      every request enters in one step, which computes the tails of their prompts: the head was cached
    all first tokens  its answer: every request's first token, applied while their second is in flight
    all end at once   every request's last token comes in one step

Milliseconds per step: median and 99th percentile. Targets, for plan + apply of steady decode and first tokens: under 1 ms at 256 running
requests, under 8 ms at 2,048. Entering and ending happen once in a request's life; there the time per request says whether it is linear.
As in the process, what is alive when the group has been made is out of the garbage collector's sight.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import pstats
import statistics
import time
from dataclasses import dataclass, field

from bench.command import run
from libs.blocks import BLOCK_SIZE, block_hashes, blocks_for
from libs.packing import pack_ids
from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.scheduler.convert import from_result, to_batch
from services.scheduler.core.apply import apply
from services.scheduler.core.group import Group
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.request import Request, RequestKey, Timeline
from services.scheduler.core.state import Limits, SchedulerState
from services.scheduler.core.stopping import StopRules, StopTracker
from tokenloom.worker.v1 import worker_pb2

PROMPT, OUTPUT, VOCABULARY = 300, 2000, 1000
# Of a burst: the prompts' common head, in tokens, most output tokens, and repetitions.
HEAD, BURST_OUTPUT, ROUNDS = 288, 24, 9
TARGET_MS = {256: 1.0, 2048: 8.0}
STEADY, ADMITTED, FIRST, ENDED = "steady decode", "all admitted", "all first tokens", "all end at once"


_TABLE = TextTable("bench", tuple(b"x" for _ in range(VOCABULARY)), bytes([TokenClass.TEXT] * VOCABULARY), TextRule.BYTE_LEVEL)
RULES = StopRules((0,), PROMPT + OUTPUT, _TABLE)


@dataclass(slots=True)
class Times:
    """Seconds of each step's parts."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)

    def summary(self, running: int, case: str) -> str:
        """One line for people."""
        core = [first + second for first, second in zip(self.plan, self.apply, strict=True)]
        parts = (("plan", self.plan), ("apply", self.apply), ("plan + apply", core), ("wire", self.wire))
        text = "   ".join(f"{name} {_ms(times, 0.5):.2f} / {_ms(times, 0.99):.2f}" for name, times in parts)
        return f"{running:>5} {case:<16}  {text} ms (median / p99)"

    @property
    def core_ms(self) -> float:
        """Median of plan + apply, in milliseconds."""
        return statistics.median(first + second for first, second in zip(self.plan, self.apply, strict=True)) * 1e3


def _ms(times: list[float], quantile: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * quantile))] * 1e3


def make_state(running: int) -> tuple[SchedulerState, Group]:
    """A group with room for so many requests; nobody is there yet."""
    # So large a budget that a burst of tails fits one step.
    limits = Limits(max(8192, running * 2 * BLOCK_SIZE), running, max_requests=running, max_model_len=PROMPT + OUTPUT)
    state = SchedulerState(limits)
    blocks = running * (blocks_for(PROMPT) + 40)
    group = state.groups["bench"] = Group.new("bench", 1, num_blocks=blocks, num_slots=running)
    return state, group


def submit(state: SchedulerState, prompt: list[int], max_tokens: int) -> None:
    """One more request waits."""
    params = SamplingParams(max_tokens=max_tokens)
    stops, arrival = StopTracker(RULES, params, len(prompt)), state.next_arrival()
    request = Request(RequestKey(1, arrival), 0, arrival, prompt, params, stops, Timeline(received_ns=1))
    request.block_names = block_hashes(prompt)
    request.cacheable = True
    state.accept(request)


def freeze() -> None:
    """See services.scheduler.server: what is alive now is collected no more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


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


def measure_steady(running: int, steps: int) -> Times:
    """Fills the group, then times `steps` decode steps."""
    state, group = make_state(running)
    freeze()
    for number in range(1, running + 1):
        # Of different lengths, so that blocks fill at different steps.
        submit(state, [number % VOCABULARY, *range(1, PROMPT - number % BLOCK_SIZE)], OUTPUT)
    plan(state, group, 1)
    number = 2
    while len(group.running) < running or any(not request.output_ids for request in group.running):
        one_step(state, group, Times(), number)
        number += 1
    times = Times()
    for turn in range(steps):
        one_step(state, group, times, number + turn)
    state.check()
    if any(len(request.output_ids) < steps // 2 for request in group.running) or len(group.running) != running:
        raise RuntimeError(f"not all requests advanced: {len(group.running)} of {running} run")
    return times


def measure_bursts(running: int) -> dict[str, Times]:
    """Times the steps in which all requests enter, have their first tokens, and end, by case."""
    state, group = make_state(running)
    freeze()
    submit(state, list(range(HEAD)), 1)  # it leaves the head in the cache
    plan(state, group, 1)
    one_step(state, group, Times(), 1)
    cases = {name: Times() for name in (ADMITTED, FIRST, ENDED)}
    for turn in range(ROUNDS):
        for number in range(running):
            submit(state, [*range(HEAD), turn, *divmod(number, VOCABULARY), *range(PROMPT - HEAD - number % 8)], BURST_OUTPUT)
        begin = time.perf_counter()
        step = plan(state, group, 1)
        cases[ADMITTED].plan.append(time.perf_counter() - begin)
        cases[ADMITTED].apply.append(0.0)
        cases[ADMITTED].wire.append(0.0)
        if step is None or len(step.opens) != running:
            raise RuntimeError("not all requests were admitted in one step")
        one_step(state, group, cases[FIRST], 2)
        while state.requests:
            last = all(len(request.output_ids) == BURST_OUTPUT - 1 for request in group.running)
            one_step(state, group, cases[ENDED] if last else Times(), 3)
        while group.closing or group.in_flight:
            plan(state, group, 4)
            apply(state, group, from_result(answer(group.in_flight[0], 1)), 4)
        if any(len(times.plan) != turn + 1 for times in cases.values()):
            raise RuntimeError("not all requests ended in one step")
    state.check()
    return cases


def _misses(running: int, case: str, times: Times) -> bool:
    return case in (STEADY, FIRST) and times.core_ms > TARGET_MS.get(running, math.inf)


def _verdict(running: int, case: str, times: Times) -> str:
    if case in (STEADY, FIRST) and running in TARGET_MS:
        return f"target {TARGET_MS[running]:g} ms: {'missed' if _misses(running, case, times) else 'met'}"
    return f"{times.core_ms * 1e3 / running:.1f} us a request"


def main() -> int:
    """Prints one line per size and case; the exit code is the number of missed targets."""
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
        cases = {STEADY: measure_steady(running, args.steps), **measure_bursts(running)}
        profile.disable()
        for case, times in cases.items():
            print(times.summary(running, case), f"  {_verdict(running, case, times)}")
            missed += _misses(running, case, times)
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return missed


if __name__ == "__main__":
    raise SystemExit(run(main))
