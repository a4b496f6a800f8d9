"""The one stream to the scheduler: keeps it up, writes what gathered, hands frames to the book. It decides nothing about requests.

One task writes and one reads; neither ever waits for a client. When either fails the session is over for both, the book moves
its tickets to the next one, and a new stream is opened with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from libs.clock import Clock
from libs.errors import TokenloomError
from libs.rpc import PROTOCOL_VERSION, connect, error_of
from libs.telemetry.logs import get_logger
from services.gateway.metrics import GatewayMetrics
from services.gateway.tickets import CancelReason, SessionBroken, Ticket, TicketBook
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# Seconds. A scheduler that says nothing (it speaks twice a second), or takes nothing off the stream for so long, counts as lost
# (PROTOCOL.md rule 21).
STALL_TIMEOUT = 10.0
MIN_BACKOFF = 0.1
MAX_BACKOFF = 2.0
# Seconds between looks at tickets that wait for a session.
TICK = 0.1
_UNKNOWN = "no scheduler has registered in the store yet"

_log = get_logger("gateway.session")
_Call: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.GatewayFrame, scheduler_pb2.SchedulerFrame]"


@dataclass(frozen=True, slots=True)
class Window:
    """What the scheduler allows this session to have outstanding, as of its last frame."""

    max_outstanding: int = 0
    max_outstanding_tokens: int = 0
    ready: bool = False
    not_ready_reason: str = "no session with the scheduler yet"


class SchedulerSession:
    """The session of this gateway process with one scheduler, across reconnects.

    `facts` are the served model's, kept while a session is down; `window` is closed while one is down.
    """

    def __init__(self, find: Callable[[], Awaitable[str]], name: str, book: TicketBook, clock: Clock, metrics: GatewayMetrics) -> None:
        """`find` is asked for the scheduler's address before every attempt; empty: it is not known yet."""
        self._find, self._name, self._book, self._clock, self._metrics = find, name, book, clock, metrics
        self._address = ""
        self._instance = random.SystemRandom().getrandbits(64) or 1
        self._to_write = asyncio.Event()
        self._session_id = 0
        self.window = Window()
        self.facts: scheduler_pb2.ModelFacts | None = None

    @property
    def instance(self) -> int:
        """Random identity of this gateway process; with a ticket's id it names a request in the whole mesh."""
        return self._instance

    @property
    def up(self) -> bool:
        """Whether a session stands."""
        return self._session_id != 0

    def submit(self, ticket: Ticket) -> None:
        """Hands a ticket over with the next frame."""
        self._book.add(ticket, self._clock.monotonic_ns())
        self._to_write.set()

    def cancel(self, ticket: Ticket, reason: CancelReason.ValueType) -> None:
        """Asks for a ticket's end; its ending tells how it ended. Repeated calls and ended tickets are ignored."""
        self._book.cancel(ticket, reason, self._clock.monotonic_ns())
        self._to_write.set()

    async def run(self) -> None:
        """Keeps a session up until cancelled."""
        ticker = asyncio.create_task(self._tick())
        backoff, found = MIN_BACKOFF, await self._find()
        try:
            while True:
                self._address = found
                async with connect(found) as channel:
                    while found == self._address:
                        was_up = await self._one_session(channel) if found else self._down(_UNKNOWN)
                        backoff = MIN_BACKOFF if was_up else min(backoff * 2, MAX_BACKOFF)
                        # Jitter, so that many gateways do not return to a restarted scheduler in the same instant.
                        await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                        found = await self._find()
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self._book.waiting:
                self._book.expire(self._clock.monotonic_ns())
                self._to_write.set()

    async def _one_session(self, channel: grpc.aio.Channel) -> bool:
        """Opens one stream and serves it until it ends. Returns whether it ever stood."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call: _Call = stub.Session()
        reason = "the scheduler ended the session"
        try:
            await self._greet(call)
            await self._serve(call)
        except SessionBroken as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the scheduler was silent for {STALL_TIMEOUT:g} s"
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            reason = _describe(error)
        except Exception as error:  # a bug here or nonsense from there must not leave the gateway without a session for good
            _log.exception("the session with the scheduler broke", scheduler=self._address)
            reason = f"{type(error).__name__}: {error}"
        finally:
            call.cancel()
            was_up = self._down(reason)
        return was_up

    async def _greet(self, call: _Call) -> None:
        hello = scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION, gateway_instance=self._instance, name=self._name)
        async with asyncio.timeout(STALL_TIMEOUT):
            await call.write(scheduler_pb2.GatewayFrame(hello=hello))
            frame = await call.read()
        if not isinstance(frame, scheduler_pb2.SchedulerFrame):
            raise SessionBroken(await _status_of(call))
        if not frame.HasField("welcome") or not frame.session:
            raise SessionBroken("the scheduler's first frame carries no welcome")
        self._session_id = frame.session
        self._metrics.session_up.set(1)
        _log.info("the session with the scheduler stands", scheduler=self._address, session=f"{frame.session:x}")
        self._receive(frame)

    async def _serve(self, call: _Call) -> None:
        """Reads and writes until either side fails."""
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        try:
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (writer, reader):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _write(self, call: _Call) -> None:
        while True:
            frame = self._book.next_frame(self._clock.monotonic_ns(), ready=self.window.ready)
            if frame is None:
                self._to_write.clear()
                await self._to_write.wait()
                continue
            async with asyncio.timeout(STALL_TIMEOUT):
                await call.write(frame)

    async def _read(self, call: _Call) -> None:
        while True:
            async with asyncio.timeout(STALL_TIMEOUT):
                frame = await call.read()
            if not isinstance(frame, scheduler_pb2.SchedulerFrame):
                raise SessionBroken(await _status_of(call))
            if frame.session == self._session_id:
                self._receive(frame)
            else:
                self._metrics.stray.labels(kind="frame").inc()

    def _receive(self, frame: scheduler_pb2.SchedulerFrame) -> None:
        if frame.HasField("welcome") and frame.welcome.HasField("model"):
            self._learn(frame.welcome.model)
        if frame.HasField("window"):
            window = frame.window
            was_ready = self.window.ready
            self.window = Window(window.max_outstanding, window.max_outstanding_tokens, window.ready, window.not_ready_reason)
            if self.window.ready and not was_ready:
                self._to_write.set()
        self._book.receive(frame, self._clock.monotonic_ns())

    def _learn(self, facts: scheduler_pb2.ModelFacts) -> None:
        """Takes the served model's facts. What waits was encoded for the model before: to another its token ids are other text."""
        known, self.facts = self.facts, facts
        if known is not None and _identity(known) != _identity(facts):
            _log.warning("another model is served from now on", model=facts.fingerprints.model[:12], failed_requests=self._book.waiting)
            self._book.fail_waiting(self._clock.monotonic_ns(), "the model was exchanged while this request waited")

    def _down(self, reason: str) -> bool:
        was_up, self._session_id = self._session_id != 0, 0
        changed = was_up or self.window.not_ready_reason != reason
        self.window = Window(not_ready_reason=reason)
        if was_up:
            self._metrics.session_up.set(0)
            self._metrics.session_losses.inc()
            self._book.lost(self._clock.monotonic_ns())
        if changed:
            # Before the first session there is nothing to lose: the scheduler is still starting, and /ready says so.
            log = _log.warning if self.facts is not None or was_up else _log.info
            log("no session with the scheduler", scheduler=self._address, reason=reason, live_requests=len(self._book))
        return was_up


def _identity(facts: scheduler_pb2.ModelFacts) -> tuple[str, str]:
    return facts.fingerprints.model, facts.fingerprints.tokenizer


async def _status_of(call: _Call) -> str:
    """Why a stream ended, for the log and for /ready."""
    code, details = await call.code(), await call.details()
    return details or f"the scheduler ended the session ({code.name})"


def _describe(error: BaseException) -> str:
    problem: TokenloomError | BaseException = error_of(error) if isinstance(error, grpc.RpcError) else error
    return str(problem) or type(problem).__name__
