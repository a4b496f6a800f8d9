"""The scheduler's core under every interleaving that PROTOCOL.md names, against a worker that models block contents."""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, settings
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

# Few distinct heads, so that prompts share prefixes of zero to three blocks.
HEADS = [[], [1] * 16, [1] * 16 + [2] * 16, [1] * 16 + [3] * 20, [4] * 40]


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, plans, results (late, duplicate, failed), lost streams, re-attachment, cancels and deadlines in any order."""

    state: SchedulerState
    group: Group | None

    @initialize(
        blocks=st.integers(8, 20),
        slots=st.integers(1, 6),
        budget=st.integers(1, 48),
        caching=st.booleans(),
        chunked=st.booleans(),
        in_flight=st.integers(1, 3),
    )
    def attach_first(self, blocks: int, slots: int, budget: int, caching: bool, chunked: bool, in_flight: int) -> None:
        budget = budget if chunked else RULES.max_model_len
        self.state = make_state(max_tokens_per_step=budget, max_sequences=slots, chunked_prefill=chunked, prefix_caching=caching)
        self.shape = {"blocks": blocks, "slots": slots, "in_flight": in_flight}
        self.epoch, self.now, self.failures = 0, 1, 0
        self.delivered: dict[RequestKey, list[int]] = {}
        self.known: dict[RequestKey, Request] = {}
        self.ended: dict[RequestKey, Request] = {}
        self.stale: list[StepOutcome] = []
        self.attach()

    def attach(self) -> None:
        self.epoch += 1
        self.group = add_group(self.state, epoch=self.epoch, **self.shape)
        self.worker = ModelWorker(self.shape["blocks"], self.shape["slots"], epoch=self.epoch)
        self.sent: deque[StepPlan] = deque()
        self.answers: deque[StepOutcome] = deque()

    def run_on_worker(self, step: StepPlan, *, fail: bool = False) -> StepOutcome:
        return from_result(self.worker.run(to_batch(step, lambda _: None), fail=fail))

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
        tail=st.lists(st.integers(1, 9), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 10),
        stop=st.lists(st.sampled_from(["a", "bc", "zz"]), max_size=2),
        seed=st.integers(0, 3),
        deadline=st.none() | st.integers(1, 60),
    )
    def submit(
        self, head: list[int], tail: list[int], max_tokens: int, min_tokens: int, stop: list[str], seed: int, deadline: int | None
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=tuple(stop), seed=seed)
        request = make_request(self.state, [*head, *tail], params, deadline_ns=deadline and self.now + deadline)
        self.state.accept(request)
        self.delivered[request.key], self.known[request.key] = [], request

    @precondition(lambda self: self.group is not None)
    @rule()
    def dispatch(self) -> None:
        assert self.group is not None
        step = plan(self.state, self.group, self.now)
        if step is not None:
            assert step.tokens <= self.state.limits.max_tokens_per_step
            assert len(step.rows) <= self.state.limits.max_sequences
            assert len({row.request.key for row in step.rows}) == len(step.rows), "a request stands twice in a batch"
            self.sent.append(step)

    @precondition(lambda self: self.group is not None and self.sent)
    @rule()
    def worker_runs(self) -> None:
        self.answers.append(self.run_on_worker(self.sent.popleft()))

    @precondition(lambda self: self.group is not None and self.sent and self.failures < 4)
    @rule()
    def worker_fails(self) -> None:
        self.failures += 1
        self.answers.append(self.run_on_worker(self.sent.popleft(), fail=True))

    @precondition(lambda self: self.group is not None and self.answers)
    @rule()
    def answer_arrives(self) -> None:
        assert self.group is not None
        answer = self.answers.popleft()
        self.stale.append(answer)
        self.take(apply(self.state, self.group, answer, self.now))

    @precondition(lambda self: self.group is not None and self.stale)
    @rule(data=st.data())
    def old_answer_arrives_again(self, data: st.DataObject) -> None:
        assert self.group is not None
        answer = data.draw(st.sampled_from(self.stale))
        before = self.state.counters.stale_results
        self.take(apply(self.state, self.group, answer, self.now))
        assert self.state.counters.stale_results == before + 1

    @precondition(lambda self: self.group is not None)
    @rule(crashed=st.booleans())
    def stream_is_lost(self, crashed: bool) -> None:
        assert self.group is not None
        crashed = crashed and self.failures < 4
        self.failures += crashed
        self.take(lose_group(self.state, self.group, self.now, crashed=crashed))
        self.group = None

    @precondition(lambda self: self.group is None)
    @rule()
    def worker_attaches(self) -> None:
        self.attach()

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
    def output_is_a_head_of_the_right_one(self) -> None:
        for key, got in getattr(self, "delivered", {}).items():
            request = self.known[key]
            want = expected_output(RULES, request.prompt_ids, request.sampling)
            assert got == want[: len(got)]
            ending = request.ending
            if ending and ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == want

    def teardown(self) -> None:
        """Progress: with a live worker and no more trouble, every request reaches its end, and nothing is held."""
        if not hasattr(self, "state"):
            return
        if self.group is None:
            self.attach()
        idle = 0
        while self.state.requests:
            before = len(self.sent) + len(self.answers)
            self.dispatch()
            if self.sent:
                self.worker_runs()
            if self.answers:
                self.answer_arrives()
            idle = idle + 1 if before == 0 and not self.sent and not self.answers and not self._moved() else 0
            assert idle < 3, f"no progress: {[(r.key, r.state, r.wait_reason) for r in self.state.requests.values()]}"
        self.everything_adds_up()
        self.output_is_a_head_of_the_right_one()
        while self.sent:
            self.worker_runs()
        while self.answers:
            self.answer_arrives()
        assert self.group is not None
        assert self.group.ledger.in_use == 0
        assert self.group.ledger.draining == 0
        assert all(request.state is RequestState.ENDED for request in self.known.values())

    def _moved(self) -> bool:
        steps, self._steps = getattr(self, "_steps", -1), self.state.counters.steps
        return steps != self._steps


CoreMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestCoreUnderEveryInterleaving = CoreMachine.TestCase
