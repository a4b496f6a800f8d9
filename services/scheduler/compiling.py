"""The engine's third part: constraints that workers compile before requests are queued. Never awaits.

What must be told (core/preparing.py) goes out with the next turn of the loop; what is answered comes in by the worker's link.
"""

from __future__ import annotations

from collections.abc import Callable

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.scheduler.core.preparing import expire, orders, prepared
from services.scheduler.shard import Shard, enters_core
from services.scheduler.workers import WorkerLink
from tokenloom.worker.v1 import worker_pb2

log = get_logger(__name__)


class Compiling:
    """See the module. `kick` plans for every worker once the current burst of messages has been read."""

    def __init__(self, shard: Shard, kick: Callable[[], None]) -> None:
        self.shard, self._kick = shard, kick

    def send_orders(self) -> None:
        """Tells every worker what it must compile, and what it may forget."""
        state = self.shard.state
        if state is None:
            return
        now = self.shard.clock.monotonic_ns()
        for name, pace in self.shard.paces.items():
            group = state.groups[name]
            told = orders(state, group, now)
            for ask in told.prepares:
                pace.link.send_prepare(worker_pb2.Prepare(epoch=group.epoch, id=ask.id, constraint=ask.constraint.to_proto()))
            if told.forgets:
                pace.link.send_forget(worker_pb2.Forget(epoch=group.epoch, ids=told.forgets))

    @enters_core()
    def answered(self, link: WorkerLink, answer: worker_pb2.Prepared) -> None:
        """See LinkOwner.worker_prepared: those who waited for it are queued, or end with the worker's error."""
        state, metrics = self.shard.state, self.shard.metrics
        group = state.groups.get(link.name) if state is not None else None
        if state is None or group is None or answer.epoch != group.epoch:
            return
        error = TokenloomError.from_proto(answer.error) if answer.HasField("error") else None
        heard, effects = prepared(state, group, answer.id, error, self.shard.clock.monotonic_ns())
        if heard is None:
            return
        metrics.prepares.labels(_outcome(answer, error)).inc()
        metrics.prepare_time.observe(heard.took_ns / 1e9)
        if error is not None:
            param = heard.check.constraint.param
            log.info("constraint refused", worker=link.name, param=param, reason=error.message, compile_us=answer.compile_us)
        self.shard.clients.publish(effects)
        self._kick()

    def tick(self) -> None:
        """Called about twice a second: answers that are owed for too long, workers that were busy."""
        state = self.shard.state
        if state is None:
            return
        unanswered = state.counters.unanswered_prepares
        effects = expire(state, self.shard.clock.monotonic_ns())
        if unanswered := state.counters.unanswered_prepares - unanswered:
            self.shard.metrics.prepares.labels("unanswered").inc(unanswered)
            log.warning("workers do not answer what they were asked to compile", constraints=unanswered)
        self.shard.clients.publish(effects)
        self.send_orders()
        if effects.ended:
            self._kick()


def _outcome(answer: worker_pb2.Prepared, error: TokenloomError | None) -> str:
    """A label of the metric, one of metrics.PREPARE_OUTCOMES."""
    if error is None:
        return "compiled" if answer.compile_us else "cached"
    if error.code is ErrorCode.CONSTRAINT_BUSY:
        return "busy"
    return "invalid" if error.code is ErrorCode.INVALID_CONSTRAINT else "failed"
