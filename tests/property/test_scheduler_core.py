"""The scheduler's core under every interleaving that PROTOCOL.md names, against workers that model block contents."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.sampling import SamplingParams
from services.scheduler.convert import from_result, to_batch
from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.plan import Effects, StepOutcome, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.request import CancelReason, Request, RequestKey, RequestState
from services.scheduler.core.state import Group, SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.core import RULES, add_group, make_request, make_state
from tests.support.model_worker import ModelWorker, expected_output
from tokenloom.worker.v1 import worker_pb2

# Few distinct heads, so that prompts share prefixes of zero to three blocks.
HEADS = [[], [1] * 16, [1] * 16 + [2] * 16, [1] * 16 + [3] * 20, [4] * 40]
ROW_FAILURES = [worker_pb2.ROW_OUTCOME_FAILED, worker_pb2.ROW_OUTCOME_NON_FINITE, worker_pb2.ROW_OUTCOME_NOT_RUN]
# Crashes and failed batches per run: fewer than would convict an innocent request by chance alone.
MAX_FAILURES = 4
# Far more turns than the longest run needs; beyond it requests chase each other in a circle.
MAX_TURNS = 5000


@dataclass
class Rig:
    """One attached group with its worker and what is on its way in either direction."""

    group: Group
    worker: ModelWorker
    sent: deque[StepPlan] = field(default_factory=deque)
    answers: deque[StepOutcome] = field(default_factory=deque)


# Tails that many prompts share, some of which end where a block does: the whole prompt can be in the cache.
WHOLE_BLOCKS = [[5] * 16, [5] * 12, [6] * 32]


class CoreMachine(RuleBasedStateMachine):
    """Arrivals and resumptions, plans, results (late, duplicate, failed in whole or in part), lost streams, cancels, deadlines."""

    state: SchedulerState

    @initialize(
        blocks=st.integers(8, 20),
        slots=st.integers(1, 6),
        budget=st.integers(1, 48),
        caching=st.booleans(),
        chunked=st.booleans(),
        in_flight=st.integers(1, 3),
        distance=st.integers(1, 2),
        groups=st.integers(1, 2),
    )
    def attach_first(
        self, blocks: int, slots: int, budget: int, caching: bool, chunked: bool, in_flight: int, distance: int, groups: int
    ) -> None:
        budget = budget if chunked else RULES.max_model_len
        self.state = make_state(max_tokens_per_step=budget, max_sequences=slots, chunked_prefill=chunked, prefix_caching=caching)
        self.shape = {"blocks": blocks, "slots": slots, "in_flight": in_flight}
        self.distance, self.names = distance, [f"g{number}" for number in range(groups)]
        self.epoch, self.now, self.failures = 0, 1, 0
        self.rigs: dict[str, Rig] = {}
        self.delivered: dict[RequestKey, list[int]] = {}
        self.known: dict[RequestKey, Request] = {}
        self.ended: dict[RequestKey, Request] = {}
        self.stale: list[tuple[str, StepOutcome]] = []
        for name in self.names:
            self.attach(name)

    def attach(self, name: str) -> None:
        self.epoch += 1
        group = add_group(self.state, name, epoch=self.epoch, **self.shape)
        group.feed_forward_distance = self.distance
        self.rigs[name] = Rig(group, ModelWorker(self.shape["blocks"], self.shape["slots"], epoch=self.epoch))

    def pick(self, number: int) -> Rig:
        return list(self.rigs.values())[number % len(self.rigs)]

    def take(self, effects: Effects) -> None:
        for delta in effects.deltas:
            got = self.delivered[delta.request.key]
            assert delta.first_index == len(got), "a delta left a gap or came twice"
            got.extend(delta.tokens)
        for request in effects.ended:
            assert request.key not in self.ended, "a request ended twice"
            self.ended[request.key] = request

    @rule(
        head=st.sampled_from(HEADS),
        tail=st.sampled_from(WHOLE_BLOCKS) | st.lists(st.integers(1, 9), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 10),
        stop=st.lists(st.sampled_from(["a", "bc", "zz"]), max_size=2),
        seed=st.integers(0, 3),
        deadline=st.none() | st.integers(1, 60),
        resumed=st.integers(0, 20),
    )
    def submit(
        self,
        head: list[int],
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: list[str],
        seed: int,
        deadline: int | None,
        resumed: int,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=tuple(stop), seed=seed)
        has = expected_output(RULES, [*head, *tail], params)[:-1][:resumed]  # what a client of an older scheduler would have
        request = make_request(self.state, [*head, *tail], params, outputs=has, deadline_ns=deadline and self.now + deadline)
        self.state.accept(request)
        self.delivered[request.key], self.known[request.key] = has, request

    @precondition(lambda self: self.rigs)
    @rule(number=st.integers(0, 1))
    def dispatch(self, number: int) -> None:
        self.send(self.pick(number))

    def send(self, rig: Rig) -> None:
        step = plan(self.state, rig.group, self.now)
        if step is None:
            return
        assert step.tokens <= self.state.limits.max_tokens_per_step
        assert len(rig.group.running) <= self.state.limits.max_sequences
        assert len({row.request.key for row in step.rows}) == len(step.rows), "a request stands twice in a batch"
        for row in step.rows:
            assert row.start + row.count < len(row.request.prompt_ids) + row.request.stops.max_output, "planned past the last token"
            earlier = [batch.number for batch in rig.sent if any(other.request is row.request for other in batch.rows)]
            assert all(step.number - number >= self.distance for number in earlier), "a request stands in batches too close"
        rig.sent.append(step)

    @precondition(lambda self: any(rig.sent for rig in self.rigs.values()))
    @rule(number=st.integers(0, 1))
    def worker_runs(self, number: int) -> None:
        self.run_next(self.pick(number))

    def run_next(self, rig: Rig, **trouble: int) -> None:
        if rig.sent:
            batch = to_batch(rig.sent.popleft(), lambda _: None)
            rig.answers.append(from_result(rig.worker.run(batch, **trouble)))

    @precondition(lambda self: any(rig.sent for rig in self.rigs.values()) and self.failures < MAX_FAILURES)
    @rule(number=st.integers(0, 1))
    def worker_fails(self, number: int) -> None:
        self.failures += 1
        self.run_next(self.pick(number), fail=True)

    @precondition(lambda self: any(rig.sent for rig in self.rigs.values()))
    @rule(number=st.integers(0, 1), row=st.integers(0, 5), outcome=st.sampled_from(ROW_FAILURES))
    def a_row_fails(self, number: int, row: int, outcome: int) -> None:
        self.run_next(self.pick(number), spoil=row, outcome=outcome)

    @precondition(lambda self: any(rig.answers for rig in self.rigs.values()))
    @rule(number=st.integers(0, 1))
    def answer_arrives(self, number: int) -> None:
        self.hear(self.pick(number))

    def hear(self, rig: Rig) -> None:
        if rig.answers:
            answer = rig.answers.popleft()
            self.stale.append((rig.group.name, answer))
            self.take(apply(self.state, rig.group, answer, self.now))

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def old_answer_arrives_again(self, data: st.DataObject) -> None:
        name, answer = data.draw(st.sampled_from(self.stale))
        if name not in self.rigs:
            return
        before = self.state.counters.stale_results
        self.take(apply(self.state, self.rigs[name].group, answer, self.now))
        assert self.state.counters.stale_results == before + 1

    @precondition(lambda self: self.rigs)
    @rule(number=st.integers(0, 1), crashed=st.booleans())
    def stream_is_lost(self, number: int, crashed: bool) -> None:
        rig = self.pick(number)
        crashed = crashed and self.failures < MAX_FAILURES
        self.failures += crashed
        del self.rigs[rig.group.name]
        self.take(lose_group(self.state, rig.group, self.now, crashed=crashed))

    @precondition(lambda self: len(self.rigs) < len(self.names))
    @rule()
    def worker_attaches(self) -> None:
        self.attach(next(name for name in self.names if name not in self.rigs))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        self.take(self.state.cancel(key, CancelReason.CLIENT_DISCONNECTED, self.now))

    @rule(step=st.integers(1, 20))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.take(self.state.expire(self.now))

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "state"):
            self.state.check()

    @invariant()
    def nothing_that_a_batch_may_touch_is_available(self) -> None:
        for rig in getattr(self, "rigs", {}).values():
            available = {*rig.group.ledger._free, *rig.group.ledger._cached}
            for batch in rig.group.in_flight:
                for row in batch.rows:
                    assert available.isdisjoint(row.residency.blocks), "a block in use by a batch in flight may be given away"

    @invariant()
    def output_is_a_head_of_the_right_one(self) -> None:
        for key, got in getattr(self, "delivered", {}).items():
            request = self.known[key]
            want = expected_output(RULES, request.prompt_ids, request.sampling)
            assert got == want[: len(got)]
            assert got == request.output_ids
            ending = request.ending
            if ending and ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == want

    def teardown(self) -> None:
        """Progress: with a live worker and no more trouble, every request reaches its end, and nothing is held."""
        if not hasattr(self, "state"):
            return
        if not self.rigs:
            self.attach(self.names[0])
        turns = idle = 0
        while self.state.requests:
            idle = 0 if self.drive() else idle + 1
            turns += 1
            waiting = [(r.key, r.state, r.wait_reason) for r in self.state.requests.values()]
            assert idle < 3, f"no progress: {waiting}"
            assert turns < MAX_TURNS, f"no end: {waiting}"
        self.everything_adds_up()
        self.output_is_a_head_of_the_right_one()
        while any(rig.sent or rig.answers for rig in self.rigs.values()):
            self.drive(plans=False)
        for rig in self.rigs.values():
            assert (rig.group.ledger.in_use, rig.group.ledger.draining) == (0, 0)
        assert all(request.state is RequestState.ENDED for request in self.known.values())

    def drive(self, *, plans: bool = True) -> bool:
        """One turn of every group; whether anything happened."""
        steps, moved = self.state.counters.steps, False
        for rig in list(self.rigs.values()):
            moved = moved or bool(rig.sent or rig.answers)
            if plans:
                self.send(rig)
            self.run_next(rig)
            self.hear(rig)
        return moved or self.state.counters.steps != steps


CoreMachine.TestCase.settings = settings(
    max_examples=150,
    phases=list(Phase),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreUnderEveryInterleaving = CoreMachine.TestCase
