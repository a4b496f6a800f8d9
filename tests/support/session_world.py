"""Gateways' books and the scheduler's engine, both real, joined by a network in memory: no gRPC, no tasks, virtual time.

A connection carries serialized frames in order, as a stream does; each end learns of its break by itself and whenever it pleases. What an
old connection still carries may arrive after the new one was opened, and in either direction. Every method is one event; after each all
that must hold between the two services is checked (PROTOCOL.md rules 17 to 20).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

from libs.clock import ManualClock
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.packing import count_ids
from libs.sampling import SamplingParams
from libs.telemetry.tracing import Tracer
from services.gateway.tickets import CancelReason, FinishReason, SessionBroken, TicketState
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.sessions import GatewaySession
from services.scheduler.workers import LostWorker, WorkerLink
from tests.support.core_leases import LeaseRunner
from tests.support.fake_worker import worker_facts
from tests.support.model_worker import ModelWorker, text_table
from tests.support.session_sides import MAX_MODEL_LEN, SECOND, Choice, GatewaySide, VirtualLoop, Wire
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

BLOCKS, SLOTS = 16, 4
MAX_QUEUE = 16
MAX_TURNS = 3000
# Failures that these worlds give a reason for: no session came in time, or too many were lost; no room; a batch that failed too often.
_ERRORS = {code.spec.code for code in (ErrorCode.SESSION_LOST, ErrorCode.QUEUE_FULL, ErrorCode.NO_WORKER, ErrorCode.POISON_REQUEST)}
_BUSY = TokenloomError(ErrorCode.CONSTRAINT_BUSY, "too many wait")


class SessionWorld:
    """See the module. Numbers that choose among things are taken modulo how many there are."""

    def __init__(self, gateways: int = 2, lease_steps: int = 1) -> None:
        self.clock = ManualClock()
        self.loop = VirtualLoop(self.clock)
        self.engine: Engine = self.loop.run_until_complete(self._engine(lease_steps))
        self.link = WorkerLink("worker", self.engine)
        self.worker: LeaseRunner | None = None
        self.answers: deque[worker_pb2.RunResponse] = deque()
        self.asks: deque[worker_pb2.Prepare] = deque()
        self.gateways = [GatewaySide(instance + 1) for instance in range(gateways)]
        self.sessions = 0
        self.seen: Counter[str] = Counter()
        self.attach()

    async def _engine(self, lease_steps: int) -> Engine:
        config = SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=SLOTS, max_queue=MAX_QUEUE, max_lease_steps=lease_steps)
        tracer = Tracer("scheduler", "test")
        return Engine(config, self.clock, tracer, SchedulerMetrics(), await Leadership.take(None), text_table(), lambda: None)

    def close(self) -> None:
        """Frees the loop."""
        self.loop.close()

    # Clients

    def submit(
        self,
        gateway: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        deadline: float | None,
        choices: int = 1,
        constraint: Constraint | None = None,
    ) -> None:
        """A client's request reaches a gateway's book, choice by choice."""
        side = self._side(gateway)
        parent_id = 0
        for index in range(choices):
            due = None if deadline is None else self.clock.monotonic_ns() + round(deadline * SECOND)
            choice = SamplingParams(max_tokens=params.max_tokens, seed=params.seed + index, choice_index=index, stop=params.stop)
            sequence = side.new_ticket(prompt, choice, due, parent_id, constraint)
            parent_id = parent_id or sequence.ticket.id
            side.book.add(sequence.ticket, self.clock.monotonic_ns())
        self.seen["submit"] += 1
        self.check()

    def read(self, gateway: int, number: int) -> None:
        """A client takes what has come for it."""
        sequence = self._sequence(gateway, number)
        if sequence is not None:
            sequence.read += sequence.ticket.take()
            self.check()

    def cancel(self, gateway: int, number: int) -> None:
        """A client leaves."""
        sequence = self._sequence(gateway, number)
        if sequence is not None:
            before = sequence.ticket.state
            sequence.cancelled |= before is not TicketState.ENDED
            self._side(gateway).book.cancel(sequence.ticket, CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED, self.clock.monotonic_ns())
            assert before is TicketState.WAITING or sequence.ticket.state is before, "its ending is the scheduler's to give"
            self.seen["cancel"] += 1
            self.check()

    def _side(self, gateway: int) -> GatewaySide:
        return self.gateways[gateway % len(self.gateways)]

    def _sequence(self, gateway: int, number: int) -> Choice | None:
        sequences = self._side(gateway).sequences
        return sequences[-1 - number % min(len(sequences), 10)] if sequences else None

    # The network

    def connect(self, gateway: int) -> None:
        """A gateway without a connection opens one; the scheduler may still hold its last."""
        side = self._side(gateway)
        if side.wire is not None:
            return
        self.sessions += 1
        session = GatewaySession(1000 + self.sessions, side.instance, f"gateway {side.instance}")
        side.wire = Wire(session)
        self.seen["reconnect, the old session open"] += any(not wire.session.closed.is_set() for wire in side.old)
        self.engine.intake.open_session(session)
        assert all(wire.session.closed.is_set() for wire in side.old), "an old session of the same gateway lives on"
        self.seen["connect"] += 1
        self.check()

    def write_up(self, gateway: int) -> None:
        """The gateway's writer sends what has gathered."""
        side = self._side(gateway)
        if side.wire is not None and side.welcomed:
            frame = side.book.next_frame(self.clock.monotonic_ns(), ready=side.window.ready)
            if frame is not None:
                side.check_submits(frame)
                side.wire.up.append(frame.SerializeToString())
                self.seen["resubmit"] += any(submit.attempt for submit in frame.submits)
                self.seen["resubmit with output"] += any(submit.output_ids for submit in frame.submits)
                self.check()

    def write_down(self, gateway: int) -> None:
        """The scheduler's writers send what their outboxes hold, on every connection of the gateway that they hold for open."""
        for wire in self._wires(gateway):
            session = wire.session
            if not session.closed.is_set() and not session.outbox.is_empty:
                wire.down.append(session.outbox.take(session.id, self.engine.intake.window(session)).SerializeToString())
                self.seen["frame written"] += 1
        self.check()

    def deliver_up(self, gateway: int, number: int) -> None:
        """The scheduler reads the next frame of one of the gateway's connections, be it the current one or not."""
        wire = self._wire(gateway, number)
        if wire is not None and wire.up:
            frame = scheduler_pb2.GatewayFrame.FromString(wire.up.popleft())
            self.seen["late frame up"] += wire.session.closed.is_set()
            for submit in frame.submits:
                self.engine.intake.submit(wire.session, submit)
            for cancel in frame.cancels:
                self.engine.intake.cancel(wire.session, cancel)
            self.check()

    def deliver_down(self, gateway: int, number: int, *, twice: bool = False) -> None:
        """A gateway is given the next frame of one of its connections, be it the current one or not; `twice`: and once more."""
        wire, side = self._wire(gateway, number), self._side(gateway)
        if wire is None or not wire.down:
            return
        frame = scheduler_pb2.SchedulerFrame.FromString(wire.down.popleft())
        self.seen["late frame down"] += wire is not side.wire
        for _ in range(1 + twice):
            self._receive(side, wire, frame)
        self.seen["frame twice"] += twice
        self.check()

    def _receive(self, side: GatewaySide, wire: Wire, frame: scheduler_pb2.SchedulerFrame) -> None:
        try:
            side.receive(wire, frame, self.clock.monotonic_ns())
        except SessionBroken:
            assert wire.holed, "frames in order make no gap"
            self.seen["gap"] += 1
            side.down(self.clock.monotonic_ns())

    def lose_frame(self, gateway: int) -> None:
        """A frame to the gateway gets lost, which must not happen to a stream: whatever follows, it is a gap or harmless."""
        wire = self._side(gateway).wire
        if wire is not None and wire.down and self._side(gateway).welcomed:
            wire.down.popleft()
            wire.holed = True
            self.seen["lost frame"] += 1

    def gateway_notices(self, gateway: int) -> None:
        """A gateway takes its connection for broken; the scheduler has not noticed."""
        side = self._side(gateway)
        self.seen["gateway lost its session"] += side.wire is not None
        side.down(self.clock.monotonic_ns())
        self.check()

    def scheduler_notices(self, gateway: int, number: int) -> None:
        """The scheduler takes one of a gateway's connections for broken; the gateway has not noticed."""
        wire = self._wire(gateway, number)
        if wire is not None and not wire.session.closed.is_set():
            self.engine.intake.close_session(wire.session)
            wire.holed = True
            self.seen["scheduler lost a session"] += 1
            self.check()

    def _wires(self, gateway: int) -> list[Wire]:
        side = self._side(gateway)
        return [*side.old[-3:], *([side.wire] if side.wire is not None else [])]

    def _wire(self, gateway: int, number: int) -> Wire | None:
        """Mostly the current connection, now and then an older one."""
        wires = self._wires(gateway)
        return wires[-1 - (number % len(wires) if number % 3 == 0 else 0)] if wires else None

    # The worker

    def attach(self) -> None:
        """The worker comes (back)."""
        if self.worker is None:
            token, epoch = self.loop.run_until_complete(self.engine.next_epoch())
            facts = worker_facts(BLOCKS, SLOTS, MAX_MODEL_LEN)
            self.worker = LeaseRunner(ModelWorker(BLOCKS, SLOTS, epoch=epoch))
            self.link.outgoing = asyncio.Queue()
            self.engine.worker_attached(self.link, worker_pb2.Attached(highest_fencing_token=token, epoch=epoch, facts=facts))
            self.seen["attach"] += 1

    def lose_worker(self) -> None:
        """The worker's stream breaks, in peace."""
        if self.worker is not None:
            self.worker = None
            self.answers.clear()
            self.asks.clear()
            self.engine.worker_lost(self.link, crashed=False)
            self.seen["worker lost"] += 1
            self.check()

    def take(self) -> None:
        """The next batch, the next cut or the next word about constraints reaches the worker."""
        if self.worker is not None and not self.link.outgoing.empty():
            message = self.link.outgoing.get_nowait()
            if message.HasField("cut"):
                self.answers.extend(self.worker.cut(message.cut))
                self.seen["cut"] += 1
            elif message.HasField("prepare"):
                self.asks.append(message.prepare)
                self.seen["asked"] += 1
            elif message.HasField("forget"):
                self.worker.worker.forget(message.forget.ids)
            else:
                self.worker.submit(message.batch)
                self.seen["lease"] += message.batch.lease_steps > 1
            self.check()

    def compile(self, *, busy: bool = False) -> None:
        """The worker's compiler is done with its oldest ask, or has no room for it."""
        if self.worker is not None and self.asks:
            answer = self.worker.worker.compile(self.asks.popleft(), _BUSY if busy else None)
            self.answers.append(worker_pb2.RunResponse(prepared=answer))
            self.seen["busy" if busy else "compiled"] += 1
            self.check()

    def work(self, *, fail: bool = False) -> None:
        """The worker runs its next step."""
        if self.worker is not None:
            if self.worker.idle:
                self.take()
            self.answers.extend(self.worker.end(fail=fail))
            self.check()

    def answer(self) -> None:
        """The worker's oldest answer reaches the engine."""
        if self.answers:
            message = self.answers.popleft()
            if message.HasField("closed"):
                self.engine.worker_closed(self.link, message.closed)
                self.seen["closed"] += 1
            elif message.HasField("prepared"):
                self.engine.worker_prepared(self.link, message.prepared)
            else:
                self._answer_step(message.result)
            self.check()

    def _answer_step(self, result: worker_pb2.StepResult) -> None:
        try:
            self.engine.worker_answered(self.link, result)
        except LostWorker:
            self.lose_worker()
        self.seen["answer"] += 1

    # Time

    def pass_time(self, seconds: float) -> None:
        """The clock moves: deadlines, timers, the half-second tick of both services."""
        self.clock.advance(seconds)
        for side in self.gateways:
            side.book.expire(self.clock.monotonic_ns())
        self.engine.tick()
        self.seen["tick"] += 1
        self.check()

    # What must hold

    def check(self) -> None:
        """Everything, after any event."""
        self.loop.spin()
        assert not self.engine.broken.is_set(), "the core raised; what, says the log"
        state = self.engine.state
        assert state is not None
        state.check()
        for side in self.gateways:
            live = 0
            for sequence in side.sequences:
                live += self._check_sequence(sequence)
            assert len(side.book) == side.admission.sequences == live, "credits and tickets disagree"
        keys = [key for wire in self._all_wires() if not wire.session.closed.is_set() for key in wire.session.keys]
        assert sorted(keys) == sorted(state.requests), "the sessions hold other requests than the scheduler"
        self._check_windows()

    def _check_sequence(self, sequence: Choice) -> bool:
        """One ticket: its tokens, its ending. Whether it is live."""
        ticket = sequence.ticket
        assert sequence.is_right, "a token is wrong, missing or there twice"
        assert sequence.read == ticket.output[: len(sequence.read)]
        over = ticket.state is TicketState.ENDED
        assert (ticket.ending is not None) == over
        assert sequence.endings == int(over), "a ticket ends exactly once"
        if ticket.ending is not None and not sequence.judged:
            self._check_ending(sequence, ticket.ending)
            sequence.judged = True
        return not over

    def _check_ending(self, sequence: Choice, ending: scheduler_pb2.Ending) -> None:
        resumed = " after a loss" if sequence.ticket.attempt else ""
        self.seen[FinishReason.Name(ending.reason).removeprefix("FINISH_REASON_").lower() + resumed] += 1
        match ending.reason:
            case FinishReason.FINISH_REASON_STOP | FinishReason.FINISH_REASON_LENGTH | FinishReason.FINISH_REASON_CONSTRAINT_COMPLETE:
                assert sequence.is_whole, "ended before its end"
                assert ending.completion_tokens == len(sequence.ticket.output)
            case FinishReason.FINISH_REASON_CANCELLED:
                assert sequence.cancelled, "cancelled, and nobody had asked for it"
            case FinishReason.FINISH_REASON_DEADLINE:
                due = sequence.ticket.deadline_ns
                assert due is not None
                assert due <= self.clock.monotonic_ns()
            case _:
                busy = sequence.constrained and ending.error.code == ErrorCode.CONSTRAINT_BUSY.spec.code
                assert busy or ending.error.code in _ERRORS, ending.error

    def _check_windows(self) -> None:
        """Credits: what the scheduler counts as a session's is what it has live."""
        windows = self.engine._clients._windows
        for wire in self._all_wires():
            use = windows._sessions.get(wire.session.id)
            assert (use is None) == wire.session.closed.is_set()
            if use is not None:
                assert use.sequences.now == len(wire.session.keys), "a session's window is miscounted"

    def _all_wires(self) -> list[Wire]:
        return [wire for side in self.gateways for wire in [*side.old, *([side.wire] if side.wire else [])]]

    def drain(self) -> None:
        """No more trouble: every ticket ends, every credit returns, nothing is left anywhere."""
        turns = 0
        while any(len(side.book) for side in self.gateways) or self.engine.state is None or self.engine.state.requests:
            turns += 1
            assert turns < MAX_TURNS, f"no end: {[(t.id, t.state) for s in self.gateways for t in s.book._live.values()]}"
            self._turn()
        for side in self.gateways:
            assert (side.admission.sequences, side.admission.tokens) == (0, 0)
        for group in self.engine.state.groups.values():
            assert group.ledger.in_use == 0
        assert self.engine.idle.is_set()
        self._check_prefix_counters()

    def _check_prefix_counters(self) -> None:
        """No prompt of an HTTP request is counted twice, as long as the counts of all that has ended are remembered."""
        submits = [sequence.ticket.submit for side in self.gateways for sequence in side.sequences]
        if len(submits) <= 4 * MAX_QUEUE and self.engine.state is not None:
            most = sum(count_ids(submit.prompt_ids) for submit in submits if not submit.parent_id)
            assert self.engine.state.counters.prefix_queries <= most, "a prompt was counted twice"

    def _turn(self) -> None:
        self.attach()
        for index, side in enumerate(self.gateways):
            if side.wire is not None and side.wire.holed:
                self.gateway_notices(index)
            self.connect(index)
            for _ in range(2):
                self.write_up(index)
                self.deliver_up(index, 1)
                self.write_down(index)
                while side.wire is not None and side.wire.down:
                    self.deliver_down(index, 1)
        while self.worker is not None and not self.link.outgoing.empty():
            self.take()
        while self.asks:
            self.compile()
        self.work()
        while self.answers:
            self.answer()
        self.pass_time(0.05)
