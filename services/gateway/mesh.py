"""The gateway's view of the mesh around it, shared by all requests of the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from libs.api_keys import KeyBook
from libs.clock import Clock
from libs.errors import ErrorCode, TokenloomError
from libs.process import guard
from libs.store import open_store
from libs.telemetry.tracing import Tracer
from services.gateway.admission import Admission
from services.gateway.config import GatewayConfig
from services.gateway.finder import SchedulerFinder
from services.gateway.keys import KeyRing
from services.gateway.metrics import GatewayMetrics
from services.gateway.quota import Quotas
from services.gateway.session import SchedulerSession
from services.gateway.tickets import BookObserver, CancelReason, Ticket, TicketBook
from services.gateway.tokenizer_client import TokenizerClient
from services.gateway.waiting_room import WaitingRoom

RETRY_AFTER_MS = 1000


class OpenRequest(Protocol):
    """A request in progress, as far as a shutdown must know it."""

    def interrupt(self, reason: CancelReason.ValueType) -> None:
        """Asks for its end."""
        ...


@dataclass(slots=True)
class Traffic:
    """Tokens so far, for the line of statistics."""

    prompt_tokens: int = 0
    generated_tokens: int = 0


class _Observer(BookObserver):
    def __init__(self, metrics: GatewayMetrics, traffic: Traffic) -> None:
        self._metrics, self._traffic = metrics, traffic

    def tokens(self, count: int, gap_ns: int) -> None:
        self._traffic.generated_tokens += count
        self._metrics.generation_tokens.inc(count)
        if gap_ns:
            self._metrics.inter_token_latency.observe(gap_ns / 1e9)

    def resumed(self, ticket: Ticket) -> None:
        self._metrics.resumed.inc()

    def stray(self, kind: str) -> None:
        self._metrics.stray.labels(kind=kind).inc()


class Mesh:
    """Session, tokenizers, keys, admission and telemetry of one gateway process, and whether it can serve.

    Raises TokenloomError for a --store that there cannot be.
    """

    def __init__(self, config: GatewayConfig, *, instance: str, clock: Clock, tracer: Tracer) -> None:
        self.config, self.clock, self.tracer = config, clock, tracer
        self.metrics = GatewayMetrics(config.model_names[0])
        self.traffic = Traffic()
        book = TicketBook(resume_timeout_ns=round(config.resume_timeout * 1e9), observer=_Observer(self.metrics, self.traffic))
        self._store = open_store(config.store, self.metrics.store) if config.store else None
        stored = KeyBook(self._store) if self._store is not None and config.api_keys_from_store else None
        self.keys, self.quotas = KeyRing(config.api_key, stored, clock), Quotas(self._store, self.metrics)
        by_store = self._store is not None and not config.given("scheduler_address")
        finder = SchedulerFinder("", self._store) if by_store else SchedulerFinder(config.scheduler_address)
        self.session = SchedulerSession(finder.find, instance, book, clock, self.metrics)
        self.tokenizers = TokenizerClient(
            config.tokenizer_address, clock, self.metrics, self._wanted_tokenizer, tracer=tracer, patience=config.tokenizer_patience
        )
        self.admission = Admission()
        self.waiting_room = WaitingRoom(lambda: self.obstacle(), config.scheduler_patience)
        self.metrics.watch(self._outstanding, self._window)
        self.book = book
        # From the order to leave on /ready refuses; `draining`, after the delay: requests are refused too.
        self.leaving = self.draining = False
        self.open: set[OpenRequest] = set()
        self.started_unix_ns = clock.unix_ns()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _outstanding(self, unit: str) -> float:
        return self.admission.tokens if unit == "tokens" else self.admission.sequences

    def _window(self, unit: str) -> float:
        window = self.session.window
        return window.max_outstanding_tokens if unit == "tokens" else window.max_outstanding

    def _wanted_tokenizer(self) -> str:
        return self.session.facts.fingerprints.tokenizer if self.session.facts is not None else ""

    def start(self) -> None:
        """Begins to connect, in the background."""
        loops: list[Coroutine[Any, Any, None]] = [self.session.run(), self.tokenizers.load_table(), self.keys.keep_fresh()]
        self._tasks = [guard(asyncio.create_task(loop)) for loop in loops]

    async def close(self) -> None:
        """Ends the session and all channels, and exports the last spans."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.tokenizers.close()
        await self.quotas.close()
        if self._store is not None:
            await self._store.close()
        # Exporting blocks for up to the exporter's timeout.
        await asyncio.to_thread(self.tracer.shutdown)

    def obstacles(self) -> list[TokenloomError]:
        """Why new requests cannot be served now, the most telling first; empty when they can."""
        found = []
        window, facts, table = self.session.window, self.session.facts, self.tokenizers.table
        if self.leaving or self.draining:
            found.append(_unready(ErrorCode.DRAINING, "the server is shutting down"))
        if not self.session.up:
            # Why is in the log: what gRPC says of a broken connection names our own sockets.
            found.append(_unready(ErrorCode.SCHEDULER_UNAVAILABLE, "no session with the scheduler stands now"))
        elif not window.ready:
            found.append(_unready(ErrorCode.NO_WORKER, window.not_ready_reason or "the scheduler is not ready"))
        elif facts is None:
            found.append(_unready(ErrorCode.NO_WORKER, "the scheduler has not told what model it serves"))
        if table is None:
            found.append(_unready(ErrorCode.TOKENIZER_UNAVAILABLE, "no tokenizer has answered yet"))
        elif not self.tokenizers.reachable:
            found.append(_unready(ErrorCode.TOKENIZER_UNAVAILABLE, "no tokenizer can be reached now"))
        elif facts is not None and facts.fingerprints.tokenizer not in ("", table.fingerprint):
            found.append(
                _unready(
                    ErrorCode.UNAVAILABLE,
                    f"the tokenizers ({table.fingerprint[:12]}) are not those of the workers' model ({facts.fingerprints.tokenizer[:12]})",
                )
            )
        return found

    def obstacle(self) -> TokenloomError | None:
        """What a request that comes now is refused with, a 503 with Retry-After, or None. Leaving is no obstacle yet: balancers are being
        given time to notice.
        """
        for found in self.obstacles():
            if found.code is not ErrorCode.DRAINING or self.draining:
                return TokenloomError(found.code, f"The server cannot take requests now: {found.message}", retry_after_ms=RETRY_AFTER_MS)
        return None

    def refuse_when_draining(self) -> None:
        """Raises DRAINING (503) once this gateway takes no requests any more."""
        if self.draining and (obstacle := self.obstacle()) is not None:
            raise obstacle

    def opened(self, request: OpenRequest) -> None:
        """A generation request begins."""
        self.open.add(request)
        self.metrics.open_streams.set(len(self.open))
        self._idle.clear()

    def closed(self, request: OpenRequest) -> None:
        """A generation request is over."""
        self.open.discard(request)
        self.metrics.open_streams.set(len(self.open))
        if not self.open:
            self._idle.set()

    async def drain(self) -> None:
        """Refuses to be ready, after drain_delay seconds new requests too, lets the open ones end for drain_timeout seconds, then
        cancels them. Returns when all are over.
        """
        self.leaving = True
        await asyncio.sleep(self.config.drain_delay)
        self.draining = True
        if not self.open:
            return
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await self._idle.wait()
        except TimeoutError:
            for request in list(self.open):
                request.interrupt(CancelReason.CANCEL_REASON_SHUTDOWN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self._idle.wait()


def _unready(code: ErrorCode, reason: str) -> TokenloomError:
    return TokenloomError(code, reason, retry_after_ms=RETRY_AFTER_MS)
