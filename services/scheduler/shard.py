"""What the engine's two halves share: the core's state, who is attached, how long nobody was; and what ends the process.

The engine (engine.py) speaks with workers, the intake (intake.py) with gateways. Both call into the core, and neither may after the core
has raised: see `enters_core`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from libs.clock import Clock
from libs.telemetry.logs import get_logger
from services.scheduler.clients import Clients
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import SubmitRules
from services.scheduler.core.state import SchedulerState
from services.scheduler.facts import welcome_of
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.pace import Pace
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

log = get_logger(__name__)


@dataclass(slots=True)
class Shard:
    """See the module. `state`, `facts` and `rules` are there once a worker has attached; `paces` are the attached workers' by name.

    `without_worker_since`, `unfit_since`: monotonic ns since when no worker is attached, or somebody waits whom none holds (None: nobody).
    `misfit`: the facts of a worker that was refused while nobody was attached, and that a scheduler which starts anew would take.
    `superseded` is set once another scheduler leads or should start, `broken` once the core has raised. After either the process ends.
    """

    config: SchedulerConfig
    clock: Clock
    metrics: SchedulerMetrics
    leadership: Leadership
    clients: Clients
    without_worker_since: int
    state: SchedulerState | None = None
    facts: worker_pb2.WorkerFacts | None = None
    rules: SubmitRules | None = None
    paces: dict[str, Pace] = field(default_factory=dict)
    unfit_since: int | None = None
    misfit: worker_pb2.WorkerFacts | None = None
    draining: bool = False
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def not_ready(self) -> str:
        """Why new requests are refused; empty: they are not."""
        if self.broken.is_set():
            return "the scheduler broke and ends"
        if self.draining:
            return "the scheduler is shutting down"
        if self.facts is None:
            return "no worker has been attached yet"
        if not self.paces and self.clock.monotonic_ns() - self.without_worker_since > self.config.worker_grace * 1e9:
            return "no worker is attached"
        return ""

    @property
    def welcome(self) -> scheduler_pb2.Welcome:
        """What a session is told first, and again when a worker attaches."""
        return welcome_of(self.facts, self.leadership.token, self.config)

    def shelve_unfit(self, state: SchedulerState, now: int) -> None:
        """Who fits none of the workers that are here waits for a larger one, as long as for any."""
        self.note_unfit(now, found=state.shelve_unfit(now))

    def note_unfit(self, now: int, *, found: bool) -> None:
        """Whether somebody waits whom no worker holds; the time runs from the first one."""
        self.unfit_since = None if not found else now if self.unfit_since is None else self.unfit_since


class _HasShard(Protocol):
    @property
    def shard(self) -> Shard: ...


_P = ParamSpec("_P")
_Owner = TypeVar("_Owner", bound=_HasShard)
_Entry: TypeAlias = Callable[Concatenate[_Owner, _P], None]


def enters_core(*passes: type[Exception]) -> Callable[[_Entry[_Owner, _P]], _Entry[_Owner, _P]]:
    """Marks a method by which a message, a timer or the loop enters the core: the last line behind all that is answered by itself.

    An exception other than `passes` may have left the core half changed: a block with two holders, a request that stands nowhere. Nothing
    that such a core decides can be trusted, and its requests would hang or, worse, read another's cache. So the core is never entered
    again: the error is logged with its traceback, `broken` is set, and the process ends without draining. Gateways hold every live
    request and give it to the next scheduler; one that kills several is given up by its gateway.
    """

    def mark(method: _Entry[_Owner, _P]) -> _Entry[_Owner, _P]:
        @functools.wraps(method)
        def enter(owner: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            if owner.shard.broken.is_set():
                return
            try:
                method(owner, *args, **kwargs)
            except passes:
                raise
            except Exception:
                log.exception("the scheduler's core broke; the process ends, gateways resubmit", entered_by=method.__name__)
                owner.shard.broken.set()

        return enter

    return mark
