"""The engine's half towards gateways: sessions, submits, cancels, deadlines. Never awaits.

Also what the core must not know: which session a request came from (clients.py), its trace, when its deadline's timer is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.errors import ErrorCode, TokenloomError
from libs.packing import count_ids
from libs.telemetry.logs import get_logger
from libs.telemetry.tracing import TraceParent, log_ids
from services.scheduler import convert
from services.scheduler.convert import SubmitRules
from services.scheduler.core.group import Group
from services.scheduler.core.request import CancelReason, Ending, Request, RequestKey, Residency, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import Stop
from services.scheduler.facts import window_of
from services.scheduler.sessions import GatewaySession
from services.scheduler.shard import Shard, enters_core
from services.scheduler.spans import RequestTrace
from tokenloom.scheduler.v1 import scheduler_pb2

log = get_logger(__name__)


def _trace_of(parent: TraceParent | None) -> dict[str, str]:
    """What leads from a log line about a submit to its trace."""
    return log_ids(parent) if parent is not None else {}


class Intake:
    """See the module. `kick` plans for every worker once the current burst of messages has been read."""

    def __init__(self, shard: Shard, kick: Callable[[], None]) -> None:
        self.shard, self._kick = shard, kick
        self._clients, self._clock, self._metrics = shard.clients, shard.clock, shard.metrics
        self._loop = asyncio.get_running_loop()
        self._deadline_timer: asyncio.TimerHandle | None = None

    @enters_core()
    def open_session(self, session: GatewaySession) -> None:
        """See SessionOwner."""
        for old in self._clients.of_gateway(session.gateway):
            log.info("gateway opens a new session; the old one ends", gateway=session.name)
            self._close(old)
        self._clients.open(session, self.shard.welcome)
        log.info("gateway session opened", gateway=session.name)

    @enters_core()
    def close_session(self, session: GatewaySession) -> None:
        """See SessionOwner: cancels what it had."""
        self._close(session)

    def _close(self, session: GatewaySession) -> None:
        if not self._clients.close(session):
            return
        for key in sorted(session.keys):
            self._cancel(key, CancelReason.SESSION_LOST)
        log.info("gateway session closed", gateway=session.name)

    def window(self, session: GatewaySession) -> scheduler_pb2.Window:
        """See SessionOwner: a share of what may be live."""
        facts = self.shard.facts
        return window_of(self._clients.share(session), facts.max_model_len if facts else 0, self.shard.not_ready)

    @enters_core()
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
        reason, state, rules = self.shard.not_ready, self.shard.state, self.shard.rules
        if reason or state is None or rules is None:
            code = ErrorCode.DRAINING if self.shard.draining else ErrorCode.NO_WORKER
            raise TokenloomError(code, reason, retry_after_ms=1000)
        now = self._clock.monotonic_ns()
        key = RequestKey(session.gateway, submit.id)
        parent = TraceParent.parse(submit.trace.traceparent, submit.trace.tracestate)
        live = state.requests.get(key)
        if live is not None:
            if submit.attempt <= live.attempt:
                log.warning("submit of a live request ignored", request=str(key), attempt=submit.attempt, **_trace_of(parent))
                return
            self._cancel(key, CancelReason.SESSION_LOST)
            session.outbox.forget(submit.id)
        request, stop = self._read(session, submit, rules, state.next_arrival(), now)
        effects = state.accept(request)
        self._kick()  # ahead of the frame that acknowledges it, which nobody's first token waits for
        self._clients.accepted(request, session, RequestTrace(parent, submit.label) if parent else None)
        tokens = count_ids(submit.prompt_ids)
        log.debug("request accepted", request=str(key), x_request_id=submit.label, prompt_tokens=tokens, **_trace_of(parent))
        if effects.ended:  # its constraint was refused a moment ago
            self._clients.publish(effects)
        elif stop is not None:
            state.finish(request, Ending(stop.reason, stop=stop), now, effects)
            self._clients.publish(effects)
        else:
            self._begin_to_wait(state, request, now)

    def _begin_to_wait(self, state: SchedulerState, request: Request, now: int) -> None:
        if not state.groups and request.wait_reason is WaitReason.NEW:
            request.wait(WaitReason.NO_WORKER, now)
        elif request.wait_reason is WaitReason.GROUP_TOO_SMALL:
            self.shard.note_unfit(now, found=True)

    def _read(
        self, session: GatewaySession, submit: scheduler_pb2.Submit, rules: SubmitRules, arrival: int, now: int
    ) -> tuple[Request, Stop | None]:
        """See convert.to_request. What breaks it costs this submit, not the session with everybody else's requests."""
        try:
            return convert.to_request(submit, session.gateway, rules, arrival, now)
        except TokenloomError:
            raise
        except Exception as error:
            trace = _trace_of(TraceParent.parse(submit.trace.traceparent))
            log.exception("a submit cannot be read", gateway=session.name, id=submit.id, x_request_id=submit.label, **trace)
            raise TokenloomError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error

    @enters_core()
    def cancel(self, session: GatewaySession, cancel: scheduler_pb2.Cancel) -> None:
        """See SessionOwner."""
        if not session.closed.is_set():  # the request may live on in the gateway's next session
            self._cancel(RequestKey(session.gateway, cancel.id), convert.cancel_reason(cancel.reason))

    def _cancel(self, key: RequestKey, reason: CancelReason) -> None:
        state = self.shard.state
        if state is None:
            return
        now, request = self._clock.monotonic_ns(), state.requests.get(key)
        if request is not None and request.residency is not None:
            self._watch_blocks(state.groups[request.residency.group], request.residency, now)
        self._clients.publish(state.cancel(key, reason, now))
        self._kick()

    def _watch_blocks(self, group: Group, residency: Residency, now: int) -> None:
        """Measures from now until the batches in flight that may touch a cancelled request's blocks are over."""
        last = group.last_touch(residency)
        if last:
            self.shard.paces[group.name].freeing.append((now, last))
        else:
            self._metrics.cancel_to_free.observe(0.0)

    def arm_deadline(self) -> None:
        """Sets the timer for the earliest deadline of those who are live."""
        due = self.shard.state.next_deadline_ns if self.shard.state else None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if due is not None:
            delay = max(0.0, (due - self._clock.monotonic_ns()) / 1e9)
            self._deadline_timer = self._loop.call_later(delay + 0.001, self._expire)

    @enters_core()
    def _expire(self) -> None:
        if self.shard.state is not None:
            self._clients.publish(self.shard.state.expire(self._clock.monotonic_ns()))
        self._kick()

    @enters_core()
    def end_all(self) -> None:
        """Cancels every live request because the process ends."""
        for key in list(self.shard.state.requests) if self.shard.state else []:
            self._cancel(key, CancelReason.SHUTDOWN)
