"""The shell's heart: one object, one thread, no awaiting. Messages come in as calls, the core decides, messages go out to queues.

On a result: apply, plan, send, and only then deltas, metrics and spans (PROTOCOL.md rule 26). With `clients` it holds what the core must
not know: which session a request came from, its trace, clocks and timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.packing import count_ids
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import TraceParent, Tracer
from libs.text.table import TextTable
from services.scheduler import convert
from services.scheduler.clients import Clients
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import SubmitRules
from services.scheduler.core.apply import apply, close, lose_group
from services.scheduler.core.leases import can_dispatch, cut, messages_in_flight, wants_cut
from services.scheduler.core.plan import BatchOutcome, Effects, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import CancelReason, Ending, Request, RequestEvent, RequestKey, Residency, WaitReason
from services.scheduler.core.state import Group, SchedulerState
from services.scheduler.core.stopping import Stop, StopRules
from services.scheduler.facts import check_fit, limits_of, welcome_of, window_of
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.pace import Pace
from services.scheduler.sessions import GatewaySession
from services.scheduler.spans import RequestTrace
from services.scheduler.workers import LostWorker, WorkerLink
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

log = get_logger(__name__)


class Engine:
    """See the module. Created inside a running loop. `superseded` is set once another leads.

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
        self.state: SchedulerState | None = None
        self._facts: worker_pb2.WorkerFacts | None = None
        self._rules: SubmitRules | None = None
        self._paces: dict[str, Pace] = {}
        self._clients = Clients(config, clock, tracer, metrics)
        self._kicked = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._without_worker_since = clock.monotonic_ns()
        self._unfit_since: int | None = None
        self._draining = False
        self.superseded = asyncio.Event()

    @property
    def idle(self) -> asyncio.Event:
        """Set while no request is live."""
        return self._clients.idle

    def next_epoch(self) -> tuple[int, int]:
        """See LinkOwner."""
        return self._leadership.next_epoch()

    def token_refused(self, highest: int, *, was_attached: bool) -> None:
        """See LinkOwner. At an attach the token is raised; a leader that had the worker and lost it to a higher token steps down."""
        if was_attached and not self.superseded.is_set():
            log.error("another scheduler leads; this one steps down", token=self._leadership.token, highest_token=highest)
            self.superseded.set()
        elif not self.superseded.is_set():
            self._leadership.raise_token(highest)

    def worker_attached(self, link: WorkerLink, attached: worker_pb2.Attached) -> None:
        """See LinkOwner. Raises TokenloomError (FINGERPRINT_MISMATCH, PROTOCOL_VIOLATION) for a worker that does not fit."""
        facts = attached.facts
        check_fit(link.name, facts, self._facts or facts, self._table.fingerprint, self._config, alone=not self._paces)
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
        self._clients.tell_all(self._welcome())
        now = self._clock.monotonic_ns()
        if len(self._paces) == 1:  # who waited for a worker waits for the one before it now, until a plan finds another reason
            state.wait_all(WaitReason.BEHIND, now)
        self._shelve_unfit(state, now)
        self._on_attached()
        self.kick()

    def _reshape(self, facts: worker_pb2.WorkerFacts) -> SchedulerState:
        """The only worker decides how long sequences and how large steps may be: the first one, or one that comes back different."""
        if self._facts is not None and self._facts.max_model_len != facts.max_model_len:
            log.warning("the context length changes with the only worker", was=self._facts.max_model_len, max_model_len=facts.max_model_len)
        policy, limits = Policy(self._config.scheduling_policy), limits_of(self._config, facts)
        stopping = StopRules(tuple(facts.eos_token_ids), facts.max_model_len, self._table)
        self._facts, self._rules = facts, SubmitRules(stopping, facts.vocab_size, priorities=policy is Policy.PRIORITY)
        if self.state is None:
            self.state = SchedulerState(limits, policy)
        self.state.limits = limits
        return self.state

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
            self._without_worker_since = now
            state.wait_all(WaitReason.NO_WORKER, now)
        else:
            self._shelve_unfit(state, now)
        self._clients.publish(effects)
        self.kick()

    def _shelve_unfit(self, state: SchedulerState, now: int) -> None:
        """Who fits none of the workers that are here waits for a larger one, as long as for any."""
        unfit = state.shelve_unfit(now)
        self._unfit_since = None if not unfit else now if self._unfit_since is None else self._unfit_since

    def step_patience_us(self, link: WorkerLink) -> float:
        """See LinkOwner: judged against the predicted time of the step, --step-timeout at most."""
        pace, state, most_us = self._paces.get(link.name), self.state, self._config.step_timeout * 1e6
        if pace is None or state is None:
            return most_us
        in_flight = state.groups[link.name].in_flight
        return pace.patience_us(in_flight[0] if in_flight else None, most_us)

    def worker_answered(self, link: WorkerLink, result: worker_pb2.StepResult) -> None:
        """See LinkOwner."""
        pace, state = self._paces.get(link.name), self.state
        if pace is None or state is None:
            return
        now, group = self._clock.monotonic_ns(), state.groups[link.name]
        head = group.in_flight[0] if group.in_flight else None
        outcome = convert.from_result(result)
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

    def _wake_idle(self, state: SchedulerState, answered: Group) -> None:
        """What one worker's answer has set free (children, suspects, who was sent back) may be work for another that has none."""
        others = (group for group in state.groups.values() if group is not answered and not group.in_flight)
        if any(state.queue or group.running for group in others):
            self.kick()

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

    def _dispatch_all(self) -> None:
        self._kicked = False
        if self.state is not None:
            for name, pace in self._paces.items():
                self._dispatch(self.state.groups[name], pace)
        self._arm_deadline()

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
            idle, most, due = not group.in_flight, 1 if self._draining else self._config.max_lease_steps, state.next_deadline_ns
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

    def _is_due(self, group: Group, pace: Pace, now: int) -> bool:
        """Whether a batch may be sent behind the running one now; if that moment is foreseeable, a timer waits for it."""
        margin_us = self._config.dispatch_margin_ms * 1000
        wait_us = pace.wait_us(group.in_flight[0], margin_us, now, steps=len(group.in_flight))
        if wait_us is None or not margin_us or messages_in_flight(group) > 1:
            return False
        # The loop's timers have a resolution of a millisecond: less than half of one is now.
        if wait_us < 500:
            return True
        pace.timer = self._loop.call_later(wait_us / 1e6, self._dispatch, group, pace)
        return False

    def open_session(self, session: GatewaySession) -> None:
        """See SessionOwner."""
        for old in self._clients.of_gateway(session.gateway):
            log.info("gateway opens a new session; the old one ends", gateway=session.name)
            self.close_session(old)
        self._clients.open(session, self._welcome())
        log.info("gateway session opened", gateway=session.name)

    def close_session(self, session: GatewaySession) -> None:
        """See SessionOwner: cancels what it had."""
        if not self._clients.close(session):
            return
        for key in sorted(session.keys):
            self._cancel(key, CancelReason.SESSION_LOST)
        log.info("gateway session closed", gateway=session.name)

    def _welcome(self) -> scheduler_pb2.Welcome:
        return welcome_of(self._facts, self._leadership.token, self._config)

    def window(self, session: GatewaySession) -> scheduler_pb2.Window:
        """See SessionOwner: a share of what may be live."""
        length = self._facts.max_model_len if self._facts else 0
        return window_of(self._clients.share(session), length, self._not_ready())

    def _not_ready(self) -> str:
        if self._draining:
            return "the scheduler is shutting down"
        if self._facts is None:
            return "no worker has been attached yet"
        if not self._paces and self._clock.monotonic_ns() - self._without_worker_since > self._config.worker_grace * 1e9:
            return "no worker is attached"
        return ""

    def submit(self, session: GatewaySession, submit: scheduler_pb2.Submit) -> None:
        """See SessionOwner."""
        if session.closed.is_set():
            return
        try:
            self._accept(session, submit)
        except TokenloomError as error:
            self._metrics.rejected.labels(error.code.spec.label).inc()
            session.outbox.endings.append(convert.refusal(submit.id, submit.attempt, error))
            session.nudge()

    def _accept(self, session: GatewaySession, submit: scheduler_pb2.Submit) -> None:
        reason, state, rules = self._not_ready(), self.state, self._rules
        if reason or state is None or rules is None:
            code = ErrorCode.DRAINING if self._draining else ErrorCode.NO_WORKER
            raise TokenloomError(code, reason, retry_after_ms=1000)
        now = self._clock.monotonic_ns()
        key = RequestKey(session.gateway, submit.id)
        live = state.requests.get(key)
        if live is not None:
            if submit.attempt <= live.attempt:
                log.warning("submit of a live request ignored", request=str(key), attempt=submit.attempt)
                return
            self._cancel(key, CancelReason.SESSION_LOST)
            session.outbox.deltas.pop(submit.id, None)  # of the older attempt; the new one begins where the gateway says
        request, stop = self._read(session, submit, rules, state.next_arrival(), now)
        state.accept(request)
        parent = TraceParent.parse(submit.trace.traceparent, submit.trace.tracestate)
        self._clients.accepted(request, session, RequestTrace(parent, submit.label) if parent else None)
        log.debug("request accepted", request=str(key), x_request_id=submit.label, prompt_tokens=count_ids(submit.prompt_ids))
        if stop is not None:
            effects = Effects()
            state.finish(request, Ending(stop.reason, stop=stop), now, effects)
            self._clients.publish(effects)
        elif not self._paces and request.wait_reason is WaitReason.NEW:
            request.wait(WaitReason.NO_WORKER, now)
        self.kick()

    def _read(
        self, session: GatewaySession, submit: scheduler_pb2.Submit, rules: SubmitRules, arrival: int, now: int
    ) -> tuple[Request, Stop | None]:
        """See convert.to_request. What breaks it costs this submit, not the session with everybody else's requests."""
        try:
            return convert.to_request(submit, session.gateway, rules, arrival, now)
        except TokenloomError:
            raise
        except Exception as error:
            log.exception("a submit cannot be read", gateway=session.name, id=submit.id)
            raise TokenloomError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error

    def cancel(self, session: GatewaySession, cancel: scheduler_pb2.Cancel) -> None:
        """See SessionOwner."""
        if not session.closed.is_set():  # the request may live on in the gateway's next session
            self._cancel(RequestKey(session.gateway, cancel.id), convert.cancel_reason(cancel.reason))

    def _cancel(self, key: RequestKey, reason: CancelReason) -> None:
        state = self.state
        if state is None:
            return
        now, request = self._clock.monotonic_ns(), state.requests.get(key)
        if request is not None and request.residency is not None:
            self._watch_blocks(state.groups[request.residency.group], request.residency, now)
        self._clients.publish(state.cancel(key, reason, now))
        self.kick()

    def _watch_blocks(self, group: Group, residency: Residency, now: int) -> None:
        """Measures from now until the batches in flight that may touch a cancelled request's blocks are over."""
        last = group.last_touch(residency)
        if last:
            self._paces[group.name].freeing.append((now, last))
        else:
            self._metrics.cancel_to_free.observe(0.0)

    def _arm_deadline(self) -> None:
        due = self.state.next_deadline_ns if self.state else None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if due is not None:
            delay = max(0.0, (due - self._clock.monotonic_ns()) / 1e9)
            self._deadline_timer = self._loop.call_later(delay + 0.001, self._expire)

    def _expire(self) -> None:
        if self.state is not None:
            self._clients.publish(self.state.expire(self._clock.monotonic_ns()))
        self.kick()

    def tick(self) -> None:
        """Called about twice a second: requests that waited too long for a worker fail; windows are split by recent demand, and every
        session hears its own, and that the loop turns."""
        if self.state is not None:
            self._end_patience(self.state, self._clock.monotonic_ns())
        self._clients.end_interval()

    def _end_patience(self, state: SchedulerState, now: int) -> None:
        """Fails those for whom no worker came back within the grace, or none that holds them."""
        grace = self._config.worker_grace * 1e9
        if not self._paces and now - self._without_worker_since > grace:
            error = TokenloomError(ErrorCode.NO_WORKER, "no worker came back in time", retry_after_ms=1000)
            self._clients.publish(state.fail_all(list(state.requests.values()), error, now))
        elif self._paces and self._unfit_since is not None and now - self._unfit_since > grace:
            self._unfit_since = None
            self._clients.publish(state.fail_unfit(now))

    @property
    def fencing_token(self) -> int:
        """What every attach carries."""
        return self._leadership.token

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process ends."""
        return self._draining

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True
        self._clients.tell_all()

    def end_all(self) -> None:
        """Cancels every live request because the process ends."""
        for key in list(self.state.requests) if self.state else []:
            self._cancel(key, CancelReason.SHUTDOWN)
