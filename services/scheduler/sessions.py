"""Sessions with gateways: outboxes that the step loop fills without ever waiting, and one writer per session that empties them.

A session's outbox is keyed by request: tokens of steps that the writer has not sent yet are appended to one entry, endings are never
dropped, so its size is bounded by what its live requests may generate. A peer that takes nothing for STALL_SECONDS loses its session.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from libs.packing import pack_ids
from libs.rpc import PROTOCOL_VERSION, abort
from libs.telemetry.logs import get_logger
from services.scheduler.core.request import RequestKey
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

STALL_SECONDS = 10.0
# Log-probabilities in one frame: far under the 64 MiB of a message, and little enough that it does not hold up the frame after it.
MAX_LOGPROBS_BYTES = 8 * 1024 * 1024
# Submits and cancels handled before the loop may turn to a worker's result.
_FRAMES_PER_TURN = 16
# What reading or writing a stream raises when it is over.
_HUNG_UP = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)

_NO_LOGPROBS = common_pb2.Logprobs()

log = get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    first_index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: PackedLogprobs | None = None

    def piece(self, first: int, end: int) -> _Entry:
        """Tokens `first` to `end` of it: itself, or a copy."""
        if end - first == len(self.tokens):
            return self
        logprobs = self.logprobs.piece(first, end) if self.logprobs is not None else None
        return _Entry(self.first_index + first, self.tokens[first:end], logprobs)


@dataclass(slots=True)
class Outbox:
    """What a session has not sent yet, merged by request."""

    accepted: list[int] = field(default_factory=list)
    told: dict[int, tuple[int, PackedLogprobs]] = field(default_factory=dict)
    deltas: dict[int, _Entry] = field(default_factory=dict)
    endings: list[scheduler_pb2.Ending] = field(default_factory=list)
    welcome: scheduler_pb2.Welcome | None = None
    window_changed: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.accepted or self.told or self.deltas or self.endings or self.welcome or self.window_changed)

    def add_tokens(self, request_id: int, first_index: int, tokens: Sequence[int], logprobs: PackedLogprobs | None = None) -> None:
        """Appends a delta; consecutive ones of a request become one. `logprobs`: of each token, or of none of the request's at all."""
        entry = self.deltas.get(request_id)
        if entry is None:
            self.deltas[request_id] = entry = _Entry(first_index)
        entry.tokens.extend(tokens)
        if logprobs is not None:
            entry.logprobs = _joined(entry.logprobs, logprobs)

    def add_positions(self, request_id: int, first: int, logprobs: PackedLogprobs) -> None:
        """Appends log-probabilities of a prompt; consecutive ones of a request become one."""
        known = self.told.get(request_id)
        self.told[request_id] = (first, _joined(None, logprobs)) if known is None else (known[0], _joined(known[1], logprobs))

    def forget(self, request_id: int) -> None:
        """Drops a request's output: of an older attempt; the new one begins where the gateway says."""
        self.deltas.pop(request_id, None)
        self.told.pop(request_id, None)

    def take(self, session: int, window: scheduler_pb2.Window) -> scheduler_pb2.SchedulerFrame:
        """Everything as one frame of packed arrays; the outbox is empty afterwards, but for log-probabilities beyond MAX_LOGPROBS_BYTES and
        what must not overtake them: the next frame carries on."""
        told, room = self._take_told(MAX_LOGPROBS_BYTES)
        deltas = self._take_deltas(room)
        left = self.told.keys() | self.deltas.keys()
        endings = [ending for ending in self.endings if ending.id not in left]
        self.endings = [ending for ending in self.endings if ending.id in left]
        accepted, welcome = self.accepted, self.welcome
        self.accepted, self.welcome, self.window_changed = [], None, False
        logprobs = [entry.logprobs.to_proto() if entry.logprobs is not None else _NO_LOGPROBS for entry in deltas.values()]
        return scheduler_pb2.SchedulerFrame(
            session=session,
            welcome=welcome,
            window=window,
            accepted=accepted,
            ids=list(deltas),
            first_indexes=[entry.first_index for entry in deltas.values()],
            counts=[len(entry.tokens) for entry in deltas.values()],
            token_ids=pack_ids(itertools.chain.from_iterable(entry.tokens for entry in deltas.values())),
            endings=endings,
            logprobs=logprobs if any(entry.logprobs is not None for entry in deltas.values()) else (),
            prompt_positions=[
                scheduler_pb2.PromptPositions(id=request_id, first_position=first, logprobs=positions.to_proto())
                for request_id, (first, positions) in told.items()
            ],
        )

    def _take_told(self, room: int) -> tuple[dict[int, tuple[int, PackedLogprobs]], int]:
        """Prompt positions of at most `room` bytes, and what room they leave."""
        taken, left = dict[int, tuple[int, PackedLogprobs]](), dict[int, tuple[int, PackedLogprobs]]()
        for request_id, (first, logprobs) in self.told.items():
            fit = min(len(logprobs), room // logprobs.position_bytes)
            room -= fit * logprobs.position_bytes
            if fit:
                taken[request_id] = (first, logprobs.piece(0, fit))
            if fit < len(logprobs):
                left[request_id], room = (first + fit, logprobs.piece(fit)), 0
        self.told = left
        return taken, room

    def _take_deltas(self, room: int) -> dict[int, _Entry]:
        """Tokens with log-probabilities of at most `room` bytes; none of a request whose prompt is not told yet."""
        taken, left = dict[int, _Entry](), dict[int, _Entry]()
        for request_id, entry in self.deltas.items():
            fit = len(entry.tokens)
            if request_id in self.told:
                fit = 0
            elif entry.logprobs is not None:
                fit = min(fit, room // entry.logprobs.position_bytes)
                room -= fit * entry.logprobs.position_bytes
            if fit:
                taken[request_id] = entry.piece(0, fit)
            if fit < len(entry.tokens):
                left[request_id] = entry.piece(fit, len(entry.tokens))
                room = room if request_id in self.told else 0
        self.deltas = left
        return taken


def _joined(known: PackedLogprobs | None, news: PackedLogprobs) -> PackedLogprobs:
    """What is known, which grows, with what follows it."""
    if known is None:
        known = PackedLogprobs(news.alternatives)
    known.extend(news)
    return known


@dataclass(slots=True, eq=False)
class GatewaySession:
    """One gateway's session. `keys` are its live requests."""

    id: int
    gateway: int
    name: str
    outbox: Outbox = field(default_factory=Outbox)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    keys: set[RequestKey] = field(default_factory=set)

    def nudge(self) -> None:
        """Tells the writer that the outbox has something."""
        self.wake.set()


class SessionOwner(Protocol):
    """What the sessions need of the engine."""

    def open_session(self, session: GatewaySession) -> None:
        """A gateway is there; an older session of the same instance must end first."""

    def close_session(self, session: GatewaySession) -> None:
        """The session is over: its requests are cancelled. Called once."""

    def submit(self, session: GatewaySession, submit: scheduler_pb2.Submit) -> None:
        """A request is handed over; refused ones are answered with an ending."""

    def cancel(self, session: GatewaySession, cancel: scheduler_pb2.Cancel) -> None:
        """A request's end is asked for."""

    def window(self, session: GatewaySession) -> scheduler_pb2.Window:
        """The session's admission window as of now."""


def _log_end(session: GatewaySession, ended: object) -> None:
    """Says what broke a session's reader or writer; that the peer hung up is nobody's fault."""
    if isinstance(ended, _HUNG_UP):
        log.debug("gateway's stream ended under its session", gateway=session.name, reason=repr(ended))
    elif isinstance(ended, Exception):  # a cancellation is none
        log.error("a session broke", gateway=session.name, exc_info=ended)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The gRPC face of the sessions; decides nothing."""

    def __init__(self, owner: SessionOwner, shard: int) -> None:
        self._owner = owner
        self._shard = shard

    async def Session(  # type: ignore[override]
        self,
        request_iterator: Any,
        context: grpc.aio.ServicerContext[scheduler_pb2.GatewayFrame, scheduler_pb2.SchedulerFrame],
    ) -> None:
        """See SchedulerService.Session."""
        first = await context.read()
        if not isinstance(first, scheduler_pb2.GatewayFrame):
            return
        try:
            session = self._greet(first)
        except TokenloomError as error:
            await abort(context, error)
        self._owner.open_session(session)
        tasks = [asyncio.create_task(self._read(session, first, context)), asyncio.create_task(self._write(session, context))]
        closed = asyncio.create_task(session.closed.wait())
        try:
            await asyncio.wait([*tasks, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._owner.close_session(session)
            for task in (*tasks, closed):
                task.cancel()
            for ended in await asyncio.gather(*tasks, closed, return_exceptions=True):
                _log_end(session, ended)

    def _greet(self, first: scheduler_pb2.GatewayFrame) -> GatewaySession:
        hello = first.hello
        if not first.HasField("hello") or not hello.gateway_instance:
            raise TokenloomError(ErrorCode.PROTOCOL_VIOLATION, "a session's first frame must carry a hello with a gateway instance")
        if abs(hello.protocol_version - PROTOCOL_VERSION) > 1 or not hello.protocol_version:
            theirs = hello.protocol_version
            raise TokenloomError(ErrorCode.PROTOCOL_VERSION, f"gateway speaks version {theirs}, this scheduler {PROTOCOL_VERSION}")
        if hello.shard != self._shard:
            raise TokenloomError(ErrorCode.WRONG_SHARD, f"this scheduler owns shard {self._shard}, not {hello.shard}")
        return GatewaySession(random.SystemRandom().getrandbits(63) | 1, hello.gateway_instance, hello.name)

    async def _read(self, session: GatewaySession, first: scheduler_pb2.GatewayFrame, context: Any) -> None:
        frame: Any = first
        for turn in itertools.count(1):
            for submit in frame.submits:
                self._owner.submit(session, submit)
            for cancel in frame.cancels:
                self._owner.cancel(session, cancel)
            if turn % _FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            frame = await context.read()
            if frame is grpc.aio.EOF:
                return

    async def _write(self, session: GatewaySession, context: Any) -> None:
        while True:
            await session.wake.wait()
            session.wake.clear()
            if session.outbox.is_empty:
                continue
            frame = session.outbox.take(session.id, self._owner.window(session))
            if not session.outbox.is_empty:
                session.nudge()
            try:
                async with asyncio.timeout(STALL_SECONDS):  # not wait_for, which can forget that the session was closed
                    await context.write(frame)
            except TimeoutError:
                log.warning("gateway takes no frames; its session is lost", gateway=session.name, seconds=STALL_SECONDS)
                return
