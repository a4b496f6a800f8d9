"""What worlds of sessions are made of: a gateway's side, a connection in memory, a loop with virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.blocks import block_hashes
from libs.clock import ManualClock
from libs.constraints import Constraint
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from services.gateway.admission import Admission
from services.gateway.session import Window
from services.gateway.tickets import Ticket, TicketBook
from services.scheduler.core.stopping import StopRules
from services.scheduler.sessions import GatewaySession
from tests.support.model_worker import EOS, expected_output, text_table
from tokenloom.scheduler.v1 import scheduler_pb2

MAX_MODEL_LEN = 128
RULES = StopRules((EOS,), MAX_MODEL_LEN, text_table())
SECOND = 1_000_000_000
RESUME_TIMEOUT = 30 * SECOND


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is a clock's that moves when told to: its timers fire when the world says so."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._manual = clock
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """Seconds on the manual clock."""
        return self._manual.monotonic_ns() / 1e9

    def spin(self) -> None:
        """Runs what is due, and what that has made due. Raises the first exception of a callback."""
        for _ in range(3):
            self.run_until_complete(asyncio.sleep(0))
        for context in self.errors:
            raise context.get("exception") or RuntimeError(context["message"])


@dataclass(eq=False, slots=True)
class Wire:
    """One connection: the scheduler's session, what is on its way up and down, and which ends still hold it.

    `holed`: a frame was lost, so that it must break before long.
    """

    session: GatewaySession
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    holed: bool = False


@dataclass(eq=False, slots=True)
class Choice:
    """A ticket with what its client must get."""

    ticket: Ticket
    want: list[int]
    read: list[int] = field(default_factory=list)
    endings: int = 0
    cancelled: bool = False
    judged: bool = False
    constrained: bool = False

    @property
    def is_right(self) -> bool:
        """Whether what the ticket has is the output so far. Where all of it came and its ending was lost, the end of sequence follows."""
        output = self.ticket.output
        return output == self.want[: len(output)] or (self.constrained and output == [*self.want, EOS])

    @property
    def is_whole(self) -> bool:
        """Whether the ticket has all of its output."""
        return self.is_right and len(self.ticket.output) >= len(self.want)


class GatewaySide:
    """One gateway process: its book, its credits, its current connection and the older ones."""

    def __init__(self, instance: int) -> None:
        self.instance = instance
        self.book = TicketBook(resume_timeout_ns=RESUME_TIMEOUT)
        self.admission = Admission()
        self.window = Window()
        self.wire: Wire | None = None
        self.welcomed = False
        self.old: list[Wire] = []
        self.sequences: list[Choice] = []
        self.attempts: dict[int, int] = {}

    def new_ticket(
        self, prompt: Sequence[int], params: SamplingParams, deadline_ns: int | None, parent_id: int, constraint: Constraint | None = None
    ) -> Choice:
        """A ticket with its lease."""
        submit = scheduler_pb2.Submit(id=self.book.next_id(), prompt_ids=pack_ids(prompt), parent_id=parent_id)
        submit.sampling.CopyFrom(params.to_proto())
        submit.block_hashes = b"".join(block_hashes(prompt))
        if constraint is not None:
            submit.constraint.CopyFrom(constraint.to_proto())
        (lease,) = self.admission.admit(Window(10**6, 10**9), [len(prompt)])
        lease.settle(len(prompt) + params.max_tokens)
        want = expected_output(RULES, prompt, params, constraint)
        sequence = Choice(Ticket(submit, asyncio.Event(), deadline_ns=deadline_ns), want, constrained=constraint is not None)

        def ended() -> None:
            sequence.endings += 1
            for _ in range(2):  # whoever holds a lease may release it
                lease.release()

        sequence.ticket.on_ended = ended
        self.sequences.append(sequence)
        return sequence

    def check_submits(self, frame: scheduler_pb2.GatewayFrame) -> None:
        """That a frame hands over live tickets, each attempt once, with all that their clients have."""
        tickets = {sequence.ticket.id: sequence.ticket for sequence in self.sequences}
        for submit in frame.submits:
            ticket = tickets[submit.id]
            assert ticket.cancel_reason is None, "a cancelled request was handed over"
            assert unpack_ids(submit.output_ids) == ticket.output, "a request was handed over without what its client has"
            assert submit.attempt > self.attempts.get(submit.id, -1), "an attempt was handed over twice"
            self.attempts[submit.id] = submit.attempt

    def receive(self, wire: Wire, frame: scheduler_pb2.SchedulerFrame, now: int) -> bool:
        """As the gateway's session reads: frames of any session but the current one are for nobody. Raises SessionBroken."""
        if wire is not self.wire or frame.session != wire.session.id:
            return False
        self.welcomed |= frame.HasField("welcome")
        if frame.HasField("window"):
            window = frame.window
            self.window = Window(window.max_outstanding, window.max_outstanding_tokens, window.ready, window.not_ready_reason)
        self.book.receive(frame, now)
        return True

    def down(self, now: int) -> None:
        """It takes its connection for lost."""
        if self.wire is not None:
            self.old.append(self.wire)
            self.wire, self.welcomed, self.window = None, False, Window()
            self.book.lost(now)
