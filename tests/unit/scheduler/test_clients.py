"""Sessions and their requests: what each hears, and how windows move with what is live."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.clock import ManualClock
from libs.telemetry.tracing import TraceParent, Tracer
from services.scheduler.clients import Clients
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.plan import Delta, Effects
from services.scheduler.core.request import CancelReason, Request
from services.scheduler.core.state import SchedulerState
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.sessions import GatewaySession
from services.scheduler.spans import RequestTrace
from services.scheduler.windows import Share
from tests.support.core import make_state
from tests.unit.scheduler.core.outcomes import submit
from tokenloom.scheduler.v1 import scheduler_pb2


class Rig:
    """Clients on a clock that stands still, and a core without workers."""

    def __init__(self, max_queue: int = 100) -> None:
        self.clock, self.metrics, self.spans = ManualClock(), SchedulerMetrics(), InMemorySpanExporter()
        self.tracer = Tracer("scheduler", "test", exporters=[self.spans])
        self.clients = Clients(SchedulerConfig(max_queue=max_queue), self.clock, self.tracer, self.metrics)
        self.state: SchedulerState = make_state(max_requests=1000)

    def session(self, number: int, gateway: int = 7) -> GatewaySession:
        session = GatewaySession(number, gateway, f"gateway-{number}")
        self.clients.open(session, scheduler_pb2.Welcome(leader_token=number))
        return session

    def accept(self, session: GatewaySession, count: int = 1, trace: RequestTrace | None = None) -> list[Request]:
        requests = [submit(self.state, [1]) for _ in range(count)]
        for request in requests:
            self.clients.accepted(request, session, trace)
        return requests

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            self.clients.publish(self.state.cancel(request.key, CancelReason.SLOW_READER, self.clock.monotonic_ns()))


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def heard(session: GatewaySession) -> bool:
    """Whether the session has been told its window since the last time."""
    told, session.outbox.window_changed = session.outbox.window_changed, False
    return told


async def test_a_session_is_welcomed_and_counted(rig: Rig):
    first, second = rig.session(1), rig.session(2)
    assert (first.outbox.welcome, second.outbox.welcome) == (
        scheduler_pb2.Welcome(leader_token=1),
        scheduler_pb2.Welcome(leader_token=2),
    )
    assert rig.metrics.registry.get_sample_value("tokenloom:gateway_sessions") == 2
    assert rig.clients.close(first)
    assert not rig.clients.close(first)
    assert first.closed.is_set()
    assert rig.metrics.registry.get_sample_value("tokenloom:gateway_sessions") == 1


async def test_sessions_are_found_by_their_gateway(rig: Rig):
    ours, _ = rig.session(1, gateway=5), rig.session(2, gateway=6)
    assert rig.clients.of_gateway(5) == [ours]
    rig.clients.close(ours)
    assert rig.clients.of_gateway(5) == []


async def test_news_reach_every_session_and_do_not_replace_a_welcome_that_was_not_sent(rig: Rig):
    first, second = rig.session(1), rig.session(2)
    assert heard(first)
    first.outbox.welcome = None
    rig.clients.tell_all()
    assert (heard(first), heard(second)) == (True, True)
    assert (first.outbox.welcome, second.outbox.welcome) == (None, scheduler_pb2.Welcome(leader_token=2))
    rig.clients.tell_all(scheduler_pb2.Welcome(leader_token=9))
    assert first.outbox.welcome == second.outbox.welcome == scheduler_pb2.Welcome(leader_token=9)


async def test_idle_is_set_while_no_request_is_live(rig: Rig):
    session = rig.session(1)
    assert rig.clients.idle.is_set()
    requests = rig.accept(session, 2)
    assert not rig.clients.idle.is_set()
    rig.end(requests[:1])
    assert not rig.clients.idle.is_set()
    rig.end(requests[1:])
    assert rig.clients.idle.is_set()


async def test_output_and_ending_go_to_the_session_that_submitted(rig: Rig):
    first, second = rig.session(1), rig.session(2)
    (request,) = rig.accept(second)
    assert second.outbox.accepted == [request.key.id]
    rig.clients.publish(Effects([Delta(request, 0, [5, 6])]))
    assert [entry.tokens for entry in second.outbox.deltas.values()] == [[5, 6]]
    rig.end([request])
    assert [ending.id for ending in second.outbox.endings] == [request.key.id]
    assert not second.keys
    assert not first.outbox.deltas
    assert not first.outbox.endings


async def test_what_ends_after_its_session_was_lost_is_still_counted(rig: Rig):
    session = rig.session(1)
    requests = rig.accept(session, 3)
    rig.clients.close(session)
    rig.end(requests)
    assert rig.metrics.registry.get_sample_value("tokenloom:request_cancelled_total", {"reason": "slow_reader"}) == 3
    assert rig.clients.share(session) == Share(0, 0)


async def test_workers_are_told_of_traces_that_somebody_records(rig: Rig):
    session = rig.session(1)
    (plain,) = rig.accept(session)
    (traced,) = rig.accept(session, trace=RequestTrace(TraceParent.new(), ""))
    (unsampled,) = rig.accept(session, trace=RequestTrace(TraceParent.new(sampled=False), ""))
    assert [rig.clients.wire_trace(request) is not None for request in (plain, traced, unsampled)] == [False, True, False]
    assert rig.clients.wire_trace(None) is None
    rig.end([traced])
    assert rig.clients.wire_trace(traced) is None


class TestWindows:
    async def test_a_burst_widens_the_window_before_the_interval_is_over(self, rig: Rig):
        busy, idle = rig.session(1), rig.session(2)
        heard(busy), heard(idle)
        rig.clock.advance(0.05)
        rig.accept(busy, 37)
        assert not heard(busy)
        rig.accept(busy, 1)  # three quarters of 50
        assert rig.clients.share(busy).sequences > 70
        assert (heard(busy), heard(idle)) == (True, True)

    async def test_not_more_often_than_every_50_ms(self, rig: Rig):
        busy, _ = rig.session(1), rig.session(2)
        rig.accept(busy, 50)
        assert rig.clients.share(busy).sequences == 50
        rig.clock.advance(0.05)
        rig.accept(busy, 1)
        assert rig.clients.share(busy).sequences > 70

    async def test_tokens_run_short_too(self):
        rig = Rig()
        rig.clients = Clients(SchedulerConfig(max_queue=100, max_queue_tokens=360), rig.clock, rig.tracer, rig.metrics)
        busy, idle = rig.session(1), rig.session(2)
        rig.clock.advance(0.05)
        rig.accept(busy, 15)  # 9 tokens each, of 180
        assert rig.clients.share(busy).tokens > 180 > rig.clients.share(idle).tokens

    async def test_what_has_ended_counts_for_two_intervals_and_everybody_is_told_each_time(self, rig: Rig):
        busy, idle = rig.session(1), rig.session(2)
        rig.end(rig.accept(busy, 40))
        shares = []
        for _ in range(3):
            heard(busy), heard(idle)
            rig.clients.end_interval()
            assert (heard(busy), heard(idle)) == (True, True)
            shares.append(rig.clients.share(busy).sequences)
        assert shares[0] == shares[1] > 50
        assert shares[2] == 50
