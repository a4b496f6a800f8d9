"""Whose requests they are: the gateways' sessions, what each has live, and where output, endings and spans go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from libs.clock import Clock
from libs.telemetry.metrics import trace_exemplar
from libs.telemetry.tracing import Tracer
from services.scheduler import convert, spans
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import WireTrace
from services.scheduler.core.plan import Effects
from services.scheduler.core.request import Request, RequestKey
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.sessions import GatewaySession
from services.scheduler.spans import RequestTrace
from services.scheduler.windows import Share, Windows
from tokenloom.scheduler.v1 import scheduler_pb2

# Least time between two splits because a session runs short. One of 1,000 sessions takes about a millisecond.
_WIDEN_NS = 50_000_000


@dataclass(slots=True)
class _Client:
    """Where a request's output goes, and where its spans hang."""

    session: GatewaySession
    trace: RequestTrace | None


class Clients:
    """See the module. Never awaits: everything goes into outboxes. `idle` is set while no request is live."""

    def __init__(self, config: SchedulerConfig, clock: Clock, tracer: Tracer, metrics: SchedulerMetrics) -> None:
        self._clock, self._tracer, self._metrics = clock, tracer, metrics
        self._sessions: dict[int, GatewaySession] = {}
        self._clients: dict[RequestKey, _Client] = {}
        self._windows = Windows(config.max_queue, config.max_queue_tokens)
        self._widened_ns = clock.monotonic_ns()
        self.idle = asyncio.Event()
        self.idle.set()

    def of_gateway(self, gateway: int) -> list[GatewaySession]:
        """The open sessions of one gateway instance."""
        return [session for session in self._sessions.values() if session.gateway == gateway]

    def open(self, session: GatewaySession, welcome: scheduler_pb2.Welcome) -> None:
        """A session is there: it is welcomed, and the windows are split anew."""
        self._sessions[session.id] = session
        self._metrics.sessions.set(len(self._sessions))
        session.outbox.welcome = welcome
        self._restate(self._windows.open(session.id))

    def close(self, session: GatewaySession) -> bool:
        """A session is over: its window returns to the others. False: it was closed already."""
        if self._sessions.pop(session.id, None) is None:
            return False
        session.closed.set()
        self._metrics.sessions.set(len(self._sessions))
        self._restate(self._windows.close(session.id))
        return True

    def share(self, session: GatewaySession) -> Share:
        """What the session may have outstanding."""
        return self._windows.share(session.id)

    def end_interval(self) -> None:
        """Splits the windows by recent demand, and tells every session its own."""
        self._windows.end_interval()
        self._restate(list(self._sessions))

    def tell_all(self, welcome: scheduler_pb2.Welcome | None = None) -> None:
        """Every session hears whether the mesh is ready, and of a new welcome if there is one."""
        for session in self._sessions.values():
            session.outbox.welcome = welcome or session.outbox.welcome
        self._restate(list(self._sessions))

    def _restate(self, sessions: Iterable[int]) -> None:
        for name in sessions:
            session = self._sessions[name]
            session.outbox.window_changed = True
            session.nudge()

    def accepted(self, request: Request, session: GatewaySession, trace: RequestTrace | None) -> None:
        """The core has taken the request."""
        self.idle.clear()
        self._clients[request.key] = _Client(session, trace)
        session.keys.add(request.key)
        self._windows.add(session.id, 1, request.most_tokens)
        session.outbox.accepted.append(request.key.id)
        session.nudge()
        self._widen(session)

    def _widen(self, session: GatewaySession) -> None:
        """A session that runs short need not wait for the interval's end: what others leave is its own soon after a burst begins."""
        now = self._clock.monotonic_ns()
        if now - self._widened_ns >= _WIDEN_NS and self._windows.is_short(session.id):
            self._widened_ns = now
            self._restate(self._windows.widen())

    def wire_trace(self, request: Request | None) -> WireTrace | None:
        """The context that the worker is told with the request; None where nobody records."""
        client = self._clients.get(request.key) if request else None
        if request is None or client is None or client.trace is None or not client.trace.parent.sampled:
            return None
        return client.trace.wire(started=request.timeline.first_token_ns > 0)

    def _exemplar(self, trace: RequestTrace | None) -> dict[str, str] | None:
        return trace_exemplar(trace.parent.trace_id, recorded=self._tracer.enabled and trace.parent.sampled) if trace else None

    def publish(self, effects: Effects) -> None:
        """Hands deltas and endings to the sessions' outboxes, then counts and traces."""
        touched: set[GatewaySession] = set()
        for told in effects.told:
            client = self._clients[told.request.key]
            client.session.outbox.add_positions(told.request.key.id, told.first, told.logprobs)
            touched.add(client.session)
        for delta in effects.deltas:
            client = self._clients[delta.request.key]
            client.session.outbox.add_tokens(delta.request.key.id, delta.first_index, delta.tokens, delta.logprobs)
            touched.add(client.session)
            self._metrics.generation_tokens.inc(len(delta.tokens))
        for request in effects.ended:
            client = self._clients.pop(request.key)
            client.session.keys.discard(request.key)
            client.session.outbox.endings.append(convert.to_ending(request, self._clock))
            self._windows.add(client.session.id, -1, -request.most_tokens)
            touched.add(client.session)
            self._metrics.ended(request, self._exemplar(client.trace))
            if client.trace is not None:
                spans.emit(self._tracer, client.trace, request, self._clock)
        for session in touched:
            session.nudge()
        if not self._clients:
            self.idle.set()
