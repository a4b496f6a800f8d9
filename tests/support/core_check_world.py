"""The world's events that only constraints know: asks that compile late, twice, never, with errors, or are lost with their stream."""

from __future__ import annotations

from collections import deque

from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core.checks import PATIENCE_NS, REFUSAL_NS, RETRY_NS
from services.scheduler.core.preparing import expire, orders, prepared
from services.scheduler.core.request import RequestState
from tests.support.core_clients import Client
from tests.support.core_lease_world import LeaseWorld
from tests.support.core_shapes import Rig, Shape
from tokenloom.worker.v1 import worker_pb2

# What a compiler may answer beside "it is there".
REFUSALS = (ErrorCode.INVALID_CONSTRAINT, ErrorCode.CONSTRAINT_BUSY, ErrorCode.INTERNAL)


class CheckWorld(LeaseWorld):
    """See the module. Orders are an event of their own: a group is told later than it could be."""

    def __init__(self, shape: Shape) -> None:
        self.old_verdicts: deque[worker_pb2.Prepared] = deque(maxlen=100)
        super().__init__(shape)

    def order(self, number: int) -> None:
        """A group is told what to compile and what to forget."""
        rig = self.pick(number)
        if rig is not None:
            self._order(rig)
            self.check()

    def _order(self, rig: Rig) -> None:
        open_asks = [rig.about[ask] for ask in rig.owed if self._is_wanted(rig, ask)]
        told = orders(self.state, rig.group, self.now)
        for ask in told.prepares:
            assert ask.constraint not in open_asks, "a group is asked twice for the same"
            assert ask.id not in rig.about, "a number is used twice"
            rig.about[ask.id] = ask.constraint
            rig.said.pop(ask.constraint, None)
            rig.void.pop(ask.constraint, None)
            self.seen["asked"] += 1
        rig.owed.update(ask.id for ask in told.prepares)
        rig.prepares.extend(told.prepares)
        rig.owed.difference_update(told.forgets)
        rig.worker.forget(told.forgets)
        self.seen["forgotten"] += bool(told.forgets)

    def compile(self, number: int, place: int, code: ErrorCode | None = None) -> None:
        """A worker's compiler is done with one of its asks; `code`: there is something wrong with it."""
        rig = self.pick(number)
        if rig is not None and rig.prepares:
            ask = rig.prepares.pop(place % len(rig.prepares))
            message = worker_pb2.Prepare(epoch=rig.group.epoch, id=ask.id, constraint=ask.constraint.to_proto())
            rig.verdicts.append(rig.worker.compile(message, TokenloomError(code, "no") if code is not None else None))

    def swallow(self, number: int) -> None:
        """A worker never answers one of its asks: patience must end it."""
        rig = self.pick(number)
        if rig is not None and rig.prepares:
            rig.prepares.pop()
            self.seen["never answered"] += 1

    def hear_verdict(self, number: int) -> None:
        """A worker's oldest word on a constraint arrives."""
        rig = self.pick(number)
        if rig is not None and rig.verdicts:
            answer = rig.verdicts.popleft()
            self.old_verdicts.append(answer)
            self._hear_verdict(rig, answer)
            self.check()

    def hear_old_verdict(self, number: int) -> None:
        """A word that was heard, or that a lost stream owed, arrives again, perhaps from another group."""
        rig = self.pick(number)
        if rig is not None and self.old_verdicts:
            answer = self.old_verdicts[number % len(self.old_verdicts)]
            self._hear_verdict(rig, answer)
            self.check()

    def _hear_verdict(self, rig: Rig, answer: worker_pb2.Prepared) -> None:
        stale, counts = self.state.counters.stale_prepared, answer.id in rig.owed and self._is_wanted(rig, answer.id)
        error = TokenloomError.from_proto(answer.error) if answer.HasField("error") else None
        if counts:
            rig.owed.remove(answer.id)
            rig.said[rig.about[answer.id]] = error
            if error is not None:
                rig.void[rig.about[answer.id]] = self.now + (RETRY_NS if error.code is ErrorCode.CONSTRAINT_BUSY else REFUSAL_NS)
        heard, effects = prepared(self.state, rig.group, answer.id, error, self.now)
        assert (heard is not None) == counts, "an answer that nobody waited for counted, or the other way round"
        assert self.state.counters.stale_prepared == stale + (not counts)
        self._take(effects)
        self.seen["compiled" if error is None else f"compile error {error.code.name}"] += counts
        self.seen["stale verdict"] += not counts

    def _is_wanted(self, rig: Rig, ask: int) -> bool:
        """Whether the ask was not withdrawn since the group was told of it, without its knowing yet."""
        return ask in self.state.checking.checks._benches[rig.group.name].asked

    def lose_patience(self) -> None:
        """So much time passes that everything that is owed has failed."""
        for rig in self.rigs.values():
            self._retry(rig, self.now + PATIENCE_NS)
            for ask in [ask for ask in rig.owed if self._is_wanted(rig, ask)]:
                rig.owed.remove(ask)
                rig.said[rig.about[ask]] = TokenloomError(ErrorCode.QUEUE_FULL, "final")
                rig.void[rig.about[ask]] = self.now + PATIENCE_NS + REFUSAL_NS
                self.seen["patience lost"] += 1
        self._take(expire(self.state, self.now + PATIENCE_NS))
        self.check()

    def retry(self) -> None:
        """A little time passes: who was busy is asked again."""
        for rig in self.rigs.values():
            self._retry(rig, self.now + RETRY_NS)
        self._take(expire(self.state, self.now + RETRY_NS))
        self.check()

    def _retry(self, rig: Rig, at: int) -> None:
        for constraint in [constraint for constraint, due in rig.void.items() if due <= at]:
            error = rig.said.pop(constraint)
            del rig.void[constraint]
            busy = error is not None and error.code is ErrorCode.CONSTRAINT_BUSY
            self.seen["busy, asked again" if busy else "refused, asked again"] += 1

    def look_at_ending(self, client: Client) -> None:
        """A constraint's refusal counts only where every group that holds the request has refused, and none of them was merely busy where
        the client has waited for its output already."""
        request, ending = client.request, client.request.ending
        if ending is None or ending.error is None or ending.error.code not in REFUSALS or request.constraint is None:
            return
        able = [rig for rig in self.rigs.values() if rig.group.holds(request)]
        said = [rig.said.get(request.constraint) for rig in able]
        assert said, "a constraint was refused by nobody"
        assert all(error is not None for error in said), "a request failed though a group has its constraint, or may have it"
        busy = [error for error in said if error is not None and error.code is ErrorCode.CONSTRAINT_BUSY]
        assert not (busy and request.is_resumed), "a resumed request failed though a group was merely busy"
        assert ending.error.param == request.constraint.param
        client.may_fail.add(ending.error.code)

    def lose(self, number: int, *, crashed: bool) -> None:
        """See World.lose. What the worker had to say of constraints may still arrive, in vain."""
        rig = self.pick(number)
        checked = sum(request.check is not None for request in rig.group.running) if rig is not None else 0
        if rig is not None:
            self.old_verdicts.extend(rig.verdicts)
        super().lose(number, crashed=crashed)
        back = [request for request in self.state.requests.values() if request.state is RequestState.CHECKING and request.was_admitted]
        self.seen["checked again after a loss"] += bool(checked and back)

    def check(self) -> None:
        """See World.check; and that the core waits for exactly those answers that its workers owe."""
        super().check()
        for name, rig in self.rigs.items():
            bench = self.state.checking.checks._benches.get(name)
            asked = set() if bench is None else set(bench.asked)
            assert asked <= rig.owed, "an answer is waited for that nobody owes"
        self.seen["checking"] += bool(len(self.state.checking))
        self.seen["ready here, not there"] += any(
            len({self.state.checking.is_ready(request, name) for name in self.state.groups}) > 1 for request in self.state.queue
        )

    def drain(self) -> None:
        """See World.drain; and that nothing is owed or kept beyond its bound."""
        self.lose_patience()  # what was swallowed
        super().drain()
        checks = self.state.checking.checks
        assert not len(self.state.checking)
        assert len(checks) <= self.shape.most_idle
        for number, rig in enumerate(self.rigs.values()):
            self._compile_all(number)
            assert not rig.owed, "an answer is owed for ever"

    def _turn(self) -> None:
        for number in range(len(self.rigs)):
            self._compile_all(number)
        self.retry()
        super()._turn()

    def _compile_all(self, number: int) -> None:
        self.order(number)
        rig = self.pick(number)
        while rig is not None and rig.prepares:
            self.compile(number, 0)
        while rig is not None and rig.verdicts:
            self.hear_verdict(number)
