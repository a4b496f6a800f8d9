"""The shell's heart, the half towards workers: what they answer is applied, the next step planned and sent. Never awaits.

On a result: apply, plan, send, and only then deltas, metrics and spans (PROTOCOL.md rule 26). The half towards gateways is `intake`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import Tracer
from libs.text.table import TextTable
from services.scheduler import convert
from services.scheduler.clients import Clients
from services.scheduler.compiling import Compiling
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import SubmitRules
from services.scheduler.core.apply import apply, close, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.leases import can_dispatch, cut, messages_in_flight, wants_cut
from services.scheduler.core.plan import BatchOutcome, StepOutcome, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import RequestEvent, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import StopRules
from services.scheduler.facts import check_fit, fits_anew, limits_of, most_logprobs
from services.scheduler.intake import Intake
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.pace import Pace
from services.scheduler.shard import Shard, enters_core
from services.scheduler.workers import LostWorker, WorkerLink
from tokenloom.worker.v1 import worker_pb2

log = get_logger(__name__)


class Engine:
    """See the module. Created inside a running loop. `intake` is what sessions speak to.

    `on_attached` is called when a worker's ledger, whose blocks are most of this process's objects, has been made.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        tracer: Tracer,
        metrics: SchedulerMetrics,
        leadership: Leadership,
        table: TextTable,
        on_attached: Callable[[], None],
    ) -> None:
        self._config, self._clock, self._metrics, self._on_attached = config, clock, metrics, on_attached
        self._leadership, self._table = leadership, table
        self._loop = asyncio.get_running_loop()
        self._clients = Clients(config, clock, tracer, metrics)
        self.shard = Shard(config, clock, metrics, leadership, self._clients, clock.monotonic_ns())
        self._paces = self.shard.paces
        self.intake = Intake(self.shard, self.kick)
        self._compiling = Compiling(self.shard, self.kick)
        self._kicked = False

    @property
    def state(self) -> SchedulerState | None:
        """The core's state; None until a worker has attached."""
        return self.shard.state

    @property
    def idle(self) -> asyncio.Event:
        """Set while no request is live."""
        return self._clients.idle

    @property
    def superseded(self) -> asyncio.Event:
        """Set once another scheduler leads, or the mesh serves another model than this one knows: the process must end."""
        return self.shard.superseded

    @property
    def broken(self) -> asyncio.Event:
        """Set once the core has raised: it is not entered again, and the process must end without draining."""
        return self.shard.broken

    async def next_epoch(self) -> tuple[int, int]:
        """See LinkOwner."""
        return await self._leadership.next_epoch()

    async def token_refused(self, highest: int, *, was_attached: bool) -> None:
        """See LinkOwner. It steps down when it had the worker and lost it to a higher token, or when another has taken a token from its
        store since: were its own raised then, the two would depose each other for ever. Else ours is raised."""
        if self.superseded.is_set():
            return
        if was_attached or not await self._leadership.outbid(highest):
            log.error("another scheduler leads; this one steps down", token=self._leadership.token, highest_token=highest)
            self.superseded.set()

    @enters_core(TokenloomError)
    def worker_attached(self, link: WorkerLink, attached: worker_pb2.Attached) -> None:
        """See LinkOwner. Raises TokenloomError (FINGERPRINT_MISMATCH, PROTOCOL_VIOLATION) for a worker that does not fit."""
        facts, alone = attached.facts, not self._paces
        try:
            check_fit(link.name, facts, self.shard.facts or facts, self._table.fingerprint, self._config, alone=alone)
        except TokenloomError:
            self.shard.misfit = facts if alone and fits_anew(link.name, facts, self._config) else None
            raise
        self.shard.misfit = None
        state = self._reshape(facts) if self.state is None or not self._paces else self.state
        state.groups[link.name] = group = Group.new(
            link.name,
            attached.epoch,
            num_blocks=facts.num_blocks,
            num_slots=facts.num_slots,
            max_in_flight=max(1, facts.max_in_flight),
            distance=max(1, facts.feed_forward_distance),
        )
        group.max_model_len = facts.max_model_len
        self._paces[link.name] = Pace(link)
        self._metrics.workers.set(len(self._paces))
        log.info("worker attached", worker=link.name, blocks=facts.num_blocks, slots=facts.num_slots, numerics=facts.fingerprints.numerics)
        self._clients.tell_all(self.shard.welcome)
        now = self._clock.monotonic_ns()
        if len(self._paces) == 1:  # who waited for a worker waits for the one before it now, until a plan finds another reason
            state.wait_all(WaitReason.BEHIND, now)
        self.shard.shelve_unfit(state, now)
        self._on_attached()
        self.kick()

    def _reshape(self, facts: worker_pb2.WorkerFacts) -> SchedulerState:
        """The only worker decides how long sequences and how large steps may be: the first one, or one that comes back different."""
        before = self.shard.facts
        if before is not None and before.max_model_len != facts.max_model_len:
            log.warning("the context length changes with the only worker", was=before.max_model_len, max_model_len=facts.max_model_len)
        policy, limits = Policy(self._config.scheduling_policy), limits_of(self._config, facts)
        stopping = StopRules(tuple(facts.eos_token_ids), facts.max_model_len, self._table)
        self.shard.facts = facts
        of_output, of_prompt = most_logprobs(self._config, facts)
        self.shard.rules = SubmitRules(
            stopping,
            facts.vocab_size,
            priorities=policy is Policy.PRIORITY,
            max_logprobs=of_output,
            max_prompt_logprobs=of_prompt,
            constraints=bool(facts.constraint_backend),
        )
        if self.shard.state is None:
            self.shard.state = SchedulerState(limits, policy)
        self.shard.state.limits = limits
        return self.shard.state

    @enters_core()
    def worker_lost(self, link: WorkerLink, *, crashed: bool) -> None:
        """See LinkOwner: its requests return to the queue."""
        pace, state = self._paces.pop(link.name, None), self.state
        if pace is None or state is None:
            return
        pace.stop_timer()
        now = self._clock.monotonic_ns()
        for since, _ in pace.freeing:
            self._metrics.cancel_to_free.observe((now - since) / 1e9)
        self._metrics.worker_losses.inc()
        self._metrics.workers.set(len(self._paces))
        group = state.groups[link.name]
        log.warning("worker lost; its requests wait for another", worker=link.name, requests=len(group.running), crashed=crashed)
        effects = lose_group(state, group, now, crashed=crashed)
        if not self._paces:
            self.shard.without_worker_since = now
            state.wait_all(WaitReason.NO_WORKER, now)
        else:
            self.shard.shelve_unfit(state, now)
        self._clients.publish(effects)
        self.kick()

    @enters_core()
    def make_way(self, tokenizer: str) -> None:
        """Ends a scheduler without workers whose mesh serves another model by now, or the same with other numerics: the tokenizers
        (`tokenizer`: their fingerprint now) and a worker that was refused go together, so that one that starts anew serves with both.

        What is live of another model fails, for its token ids mean nothing to the new one; else gateways take it to the next scheduler.
        """
        facts, mesh, state = self.shard.misfit, self.shard.facts, self.state
        if facts is None or self._paces or facts.fingerprints.tokenizer != tokenizer:
            return
        other = mesh is None or (mesh.fingerprints.model, mesh.fingerprints.tokenizer) != (facts.fingerprints.model, tokenizer)
        if state is not None and other:
            error = TokenloomError(ErrorCode.NO_WORKER, "the model was exchanged for another; ask again", retry_after_ms=1000)
            self._clients.publish(state.fail_all(list(state.requests.values()), error, self._clock.monotonic_ns()))
        log.error("the workers are not those of this scheduler's model any more; it ends, and the next one serves them", other_model=other)
        self.superseded.set()

    def step_patience_us(self, link: WorkerLink) -> float:
        """See LinkOwner: judged against the predicted time of the step, --step-timeout at most."""
        pace, state, most_us = self._paces.get(link.name), self.state, self._config.step_timeout * 1e6
        if pace is None or state is None:
            return most_us
        in_flight = state.groups[link.name].in_flight
        return pace.patience_us(in_flight[0] if in_flight else None, most_us)

    @enters_core(LostWorker)
    def worker_answered(self, link: WorkerLink, result: worker_pb2.StepResult) -> None:
        """See LinkOwner."""
        pace, state = self._paces.get(link.name), self.state
        if pace is None or state is None:
            return
        now, group = self._clock.monotonic_ns(), state.groups[link.name]
        head = group.in_flight[0] if group.in_flight else None
        outcome = self._read_result(result)
        effects = apply(state, group, outcome, now)
        self._metrics.apply_time.observe((self._clock.monotonic_ns() - now) / 1e9)
        if head is None or (outcome.epoch, outcome.number) != (head.epoch, head.number):
            # Answers come in order: the one before this will never come.
            if head is not None and outcome.epoch == head.epoch and outcome.number > head.number:
                raise LostWorker(f"the worker answered step {outcome.number} and owes step {head.number}")
            return
        if outcome.outcome is BatchOutcome.NOT_RUN and not head.predecessor:
            self._clients.publish(effects)
            raise LostWorker(f"the worker refused step {head.number}, which has no predecessor")
        began = pace.started_ns if head.is_later else head.planned_ns
        pace.started_ns = now
        if outcome.outcome is BatchOutcome.OK and pace.observe(head, outcome.timings.total_us):
            slow = RequestEvent("slow_step", now, f"{outcome.timings.total_us // 1000} ms", amount=head.tokens)
            for row in head.rows:
                row.request.timeline.note(slow)
        self._dispatch(group, pace)
        if outcome.error is not None:
            budget = group.most_tokens or state.limits.max_tokens_per_step
            log.error("batch did not run", worker=link.name, step=outcome.number, error=outcome.error.message, token_budget=budget)
        self._account_step(group, pace, head, began, now)
        self._clients.publish(effects)
        self._wake_idle(state, group)

    @staticmethod
    def _read_result(result: worker_pb2.StepResult) -> StepOutcome:
        """See convert.from_result. An answer that breaks it is the worker's fault and costs its stream, not this process."""
        try:
            return convert.from_result(result)
        except Exception as error:
            raise LostWorker(f"the worker's answer to step {result.number} cannot be read: {type(error).__name__}: {error}") from error

    def _wake_idle(self, state: SchedulerState, answered: Group) -> None:
        """What one worker's answer has set free (children, suspects, who was sent back) may be work for another that has none."""
        others = (group for group in state.groups.values() if group is not answered and not group.in_flight)
        if any(state.queue or group.running for group in others):
            self.kick()

    @enters_core()
    def worker_closed(self, link: WorkerLink, closed: worker_pb2.Closed) -> None:
        """See LinkOwner: who waited for the lease's end is planned for now."""
        pace, state = self._paces.get(link.name), self.state
        if pace is None or state is None:
            return
        now, group = self._clock.monotonic_ns(), state.groups[link.name]
        effects = close(state, group, convert.from_closed(closed), now)
        self._dispatch(group, pace)
        if not group.in_flight:
            self._account_freed(pace, group.last_number, now)
        self._clients.publish(effects)
        self._wake_idle(state, group)

    def worker_prepared(self, link: WorkerLink, answer: worker_pb2.Prepared) -> None:
        """See LinkOwner."""
        self._compiling.answered(link, answer)

    def _account_step(self, group: Group, pace: Pace, head: StepPlan, began: int, now: int) -> None:
        metrics = self._metrics
        if head.rows:
            following = group.in_flight[0] if group.in_flight else None
            if following is None or not following.is_later:
                metrics.lead_time.observe(max(0, now - following.planned_ns) / 1e9 if following else 0.0)
            metrics.step_time.observe((now - began) / 1e9)
            metrics.step_tokens.observe(head.tokens)
        self._account_freed(pace, head.settles, now)

    def _account_freed(self, pace: Pace, step: int, now: int) -> None:
        for since in pace.take_freed(step):
            self._metrics.cancel_to_free.observe((now - since) / 1e9)

    def kick(self) -> None:
        """Plans for every group once the current burst of messages has been read."""
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._dispatch_all)

    @enters_core()
    def _dispatch_all(self) -> None:
        self._kicked = False
        self._compiling.send_orders()
        if self.state is not None:
            for name, pace in self._paces.items():
                self._dispatch(self.state.groups[name], pace)
        self.intake.arm_deadline()

    def _dispatch(self, group: Group, pace: Pace) -> None:
        """Sends the next batch if its time has come: at once when the worker is idle, else shortly before the running one ends.

        A lease that is in somebody's way is cut; its answer brings us back here.
        """
        state = self.state
        if state is None:
            return
        pace.stop_timer()
        if wants_cut(state, group) and (asked := cut(group)) is not None:
            pace.link.send_cut(convert.to_cut(asked))
        while can_dispatch(group):
            now = self._clock.monotonic_ns()
            if group.in_flight and not self._is_due(group, pace, now):
                return
            idle, most, due = not group.in_flight, 1 if self.shard.draining else self._config.max_lease_steps, state.next_deadline_ns
            if most > 1:
                most = pace.lease_steps(len(group.running), most, due, now)
            step = plan(state, group, now, most)
            if step is None:
                return
            if idle:
                pace.started_ns = now
            self._metrics.lease_steps.observe(step.steps)
            pace.link.send(convert.to_batch(step, lambda key: self._clients.wire_trace(state.requests.get(key))))
            self._metrics.plan_time.observe((self._clock.monotonic_ns() - now) / 1e9)

    @enters_core()
    def _dispatch_later(self, group: Group, pace: Pace) -> None:
        """The moment that was foreseen has come."""
        self._dispatch(group, pace)

    def _is_due(self, group: Group, pace: Pace, now: int) -> bool:
        """Whether a batch may be sent behind the running one now; if that moment is foreseeable, a timer waits for it."""
        margin_us = self._config.dispatch_margin_ms * 1000
        wait_us = pace.wait_us(group.in_flight[0], margin_us, now, steps=len(group.in_flight))
        if wait_us is None or not margin_us or messages_in_flight(group) > 1:
            return False
        # The loop's timers have a resolution of a millisecond: less than half of one is now.
        if wait_us < 500:
            return True
        pace.timer = self._loop.call_later(wait_us / 1e6, self._dispatch_later, group, pace)
        return False

    @enters_core()
    def tick(self) -> None:
        """Called about twice a second: requests that waited too long for a worker fail; windows are split by recent demand, and every
        session hears its own, and that the loop turns."""
        if self.state is not None:
            self._end_patience(self.state, self._clock.monotonic_ns())
            self._compiling.tick()
        self._clients.end_interval()

    def _end_patience(self, state: SchedulerState, now: int) -> None:
        """Fails those for whom no worker came back within the grace, or none that holds them."""
        grace = self._config.worker_grace * 1e9
        if not self._paces and now - self.shard.without_worker_since > grace:
            error = TokenloomError(ErrorCode.NO_WORKER, "no worker came back in time", retry_after_ms=1000)
            self._clients.publish(state.fail_all(list(state.requests.values()), error, now))
        elif self._paces and self.shard.unfit_since is not None and now - self.shard.unfit_since > grace:
            self.shard.unfit_since = None
            self._clients.publish(state.fail_unfit(now))

    @property
    def fencing_token(self) -> int:
        """What every attach carries."""
        return self._leadership.token

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process ends."""
        return self.shard.draining

    @enters_core()
    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.shard.draining = True
        self._clients.tell_all()
