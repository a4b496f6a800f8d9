"""What is compiled where: constraints that live requests want, by group, and what each group must be told of them. Knows no requests.

    want     somebody needs a constraint: every attached group that has not been asked is asked with its next `orders`
    answer   a group has it (READY), has refused it (FAILED) or had no room for it (BUSY: asked again soon; FAILED: much later)
    release  nobody needs it any more: it stays, idle, until `MOST_IDLE` others were used since; then groups may forget it

An ask has a number of its own, never used again, so that an answer to one that was withdrawn is told apart.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError

# Constraints that nobody wants and that groups still keep compiled, and bytes of their texts.
MOST_IDLE, MOST_IDLE_BYTES = 256, 32 << 20
# How long (ns) a group that owes answers may be silent; how long after it was busy, or has refused, it is asked again for who wants it.
PATIENCE_NS, RETRY_NS, REFUSAL_NS = 60_000_000_000, 1_000_000_000, 30_000_000_000
# How long (ns) it may owe one answer while it gives others: many constraints that came at once are no fault of the last.
LONGEST_NS = 10 * PATIENCE_NS


class Standing(enum.Enum):
    """What is known of a constraint in a group. A group that was not asked yet counts as ASKED."""

    ASKED = "asked"
    READY = "ready"
    BUSY = "busy"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Check:
    """A constraint in the table; `wanted`: live requests that it is kept for."""

    constraint: Constraint
    wanted: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.constraint.texts))


@dataclass(slots=True)
class Answer:
    """A group's last word on a constraint: `id` is the ask's, `since_ns` when it was asked, or answered. `error`: of BUSY and FAILED."""

    standing: Standing
    id: int
    since_ns: int
    error: TokenloomError | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """An ask on its way to a group."""

    id: int
    constraint: Constraint


@dataclass(frozen=True, slots=True)
class Orders:
    """What a group must be told now."""

    prepares: list[Prepare] = field(default_factory=list)
    forgets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer that counts: which constraint it was about, and how long (ns) it took since the ask."""

    check: Check
    took_ns: int


@dataclass(slots=True)
class _Bench:
    """One group's side. `asked`: asks without an answer, oldest first, by id; `unasked`: to be asked; `again`: when (ns) an answer other
    than READY is void; `forgets`: ids that may go once the step beside them is over (None: it is not known yet which step that is);
    `heard_ns`: its last answer."""

    answers: dict[Check, Answer] = field(default_factory=dict)
    asked: dict[int, Check] = field(default_factory=dict)
    again: dict[Check, int] = field(default_factory=dict)
    unasked: dict[Check, None] = field(default_factory=dict)
    forgets: deque[tuple[int | None, int]] = field(default_factory=deque)
    heard_ns: int = 0


class Checks:
    """See the module. Groups are named; one that was lost and comes back knows nothing."""

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self._most_idle = most_idle
        self._table: dict[Constraint, Check] = {}
        self._idle: OrderedDict[Check, None] = OrderedDict()
        self._idle_bytes = 0
        self._benches: dict[str, _Bench] = {}
        self._asks = 0

    def __len__(self) -> int:
        """Constraints in the table."""
        return len(self._table)

    @property
    def unanswered(self) -> int:
        """Asks that groups owe an answer to."""
        return sum(len(bench.asked) for bench in self._benches.values())

    def want(self, constraint: Constraint) -> Check:
        """One more live request needs it."""
        check = self._table.get(constraint)
        if check is None:
            check = self._table[constraint] = Check(constraint)
        elif not check.wanted:
            del self._idle[check]
            self._idle_bytes -= check.size
        check.wanted += 1
        for bench in self._benches.values():
            if check not in bench.answers:
                bench.unasked[check] = None
        return check

    def release(self, check: Check) -> None:
        """One live request less needs it. Those that were idle longest leave the table beyond its bounds."""
        check.wanted -= 1
        if check.wanted:
            return
        self._idle[check] = None
        self._idle_bytes += check.size
        while len(self._idle) > self._most_idle or self._idle_bytes > MOST_IDLE_BYTES:
            oldest, _ = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.size
            self._evict(oldest)

    def _evict(self, check: Check) -> None:
        del self._table[check.constraint]
        for bench in self._benches.values():
            bench.unasked.pop(check, None)
            bench.again.pop(check, None)
            answer = bench.answers.pop(check, None)
            if answer is not None and answer.standing in (Standing.ASKED, Standing.READY):
                bench.asked.pop(answer.id, None)
                bench.forgets.append((None, answer.id))

    def standing(self, check: Check, group: str) -> Standing:
        """What the group says of it."""
        bench = self._benches.get(group)
        answer = bench.answers.get(check) if bench is not None else None
        return Standing.ASKED if answer is None else answer.standing

    def error(self, check: Check, group: str) -> TokenloomError | None:
        """Why the group does not have it; None: it has, or has not said."""
        bench = self._benches.get(group)
        answer = bench.answers.get(check) if bench is not None else None
        return None if answer is None else answer.error

    def id_in(self, check: Check, group: str) -> int:
        """What an open names it by. Raises ValueError where the group does not have it."""
        bench = self._benches.get(group)
        answer = bench.answers.get(check) if bench is not None else None
        if answer is None or answer.standing is not Standing.READY:
            raise ValueError(f"{group} was not prepared for a constraint of {check.constraint.param}")
        return answer.id

    def orders(self, group: str, now_ns: int, *, sent: int, settled: int) -> Orders:
        """What the group must be told now; it counts as told. `sent`: the last step that it was given, `settled`: the last that is over.

        A constraint is forgotten only when the steps sent before are over: an open that names it may still lie among them.
        """
        orders, bench = Orders(), self._bench(group)
        for check in bench.unasked:
            if check.wanted and check not in bench.answers:
                self._asks += 1
                bench.answers[check] = Answer(Standing.ASKED, self._asks, now_ns)
                bench.asked[self._asks] = check
                orders.prepares.append(Prepare(self._asks, check.constraint))
        bench.unasked.clear()
        waiting: deque[tuple[int | None, int]] = deque()
        for step, ask in bench.forgets:
            if (sent if step is None else step) <= settled:
                orders.forgets.append(ask)
            else:
                waiting.append((sent if step is None else step, ask))
        bench.forgets = waiting
        return orders

    def _bench(self, group: str) -> _Bench:
        """The group's side; of one that has just come every wanted constraint is unasked."""
        bench = self._benches.get(group)
        if bench is None:
            wanted = {check: None for check in self._table.values() if check.wanted}
            bench = self._benches[group] = _Bench(unasked=wanted)
        return bench

    def answered(self, group: str, ask: int, error: TokenloomError | None, now_ns: int) -> Heard | None:
        """Takes a group's answer. None: nobody waits for it (it was withdrawn, comes twice, or never was asked)."""
        bench = self._benches.get(group)
        check = bench.asked.pop(ask, None) if bench is not None else None
        if bench is None or check is None:
            return None
        bench.heard_ns, took = now_ns, now_ns - bench.answers[check].since_ns
        standing = Standing.READY
        if error is not None:
            standing = Standing.BUSY if error.code is ErrorCode.CONSTRAINT_BUSY else Standing.FAILED
        bench.answers[check] = Answer(standing, ask, now_ns, error)
        if error is not None:
            bench.again[check] = now_ns + (RETRY_NS if standing is Standing.BUSY else REFUSAL_NS)
        return Heard(check, took)

    def expire(self, now_ns: int) -> list[Check]:
        """What time alone changes: asks whose patience is over have failed (returned), and groups that were busy, or refused long ago, are
        asked again: a refusal may have been a bad moment's."""
        failed: list[Check] = []
        for bench in self._benches.values():
            for ask, check in list(bench.asked.items()):
                since = bench.answers[check].since_ns
                if now_ns - max(since, bench.heard_ns) < PATIENCE_NS and now_ns - since < LONGEST_NS:
                    break
                message = f"no worker has compiled the constraint within {(now_ns - since) // 1_000_000_000} s"
                error = TokenloomError(ErrorCode.CONSTRAINT_BUSY, message, retry_after_ms=REFUSAL_NS // 1_000_000)
                del bench.asked[ask]
                bench.answers[check] = Answer(Standing.FAILED, ask, now_ns, error)
                bench.again[check] = now_ns + REFUSAL_NS
                bench.forgets.append((None, ask))
                failed.append(check)
            for check in [check for check, due in bench.again.items() if due <= now_ns]:
                del bench.again[check], bench.answers[check]
                bench.unasked[check] = None
        return failed

    def lose(self, group: str) -> None:
        """The group is gone, with all that it had compiled."""
        self._benches.pop(group, None)

    def check(self, wanted: dict[Check, int]) -> None:
        """Raises ValueError when the table disagrees with the live requests (`wanted`: how many want each), or with itself."""
        if {check: check.wanted for check in self._table.values() if check.wanted} != wanted:
            raise ValueError("constraints are wanted by others than the live requests")
        if set(self._idle) != {check for check in self._table.values() if not check.wanted}:
            raise ValueError("constraints stand idle that are not")
        if self._idle_bytes != sum(check.size for check in self._idle) or len(self._idle) > self._most_idle:
            raise ValueError("idle constraints are miscounted, or too many")
        for group, bench in self._benches.items():
            asked = {check: answer.id for check, answer in bench.answers.items() if answer.standing is Standing.ASKED}
            if asked != {check: ask for ask, check in bench.asked.items()}:
                raise ValueError(f"{group} owes answers that nobody waits for, or the other way round")
            known = set(self._table.values())
            if not (bench.answers.keys() <= known and bench.unasked.keys() <= known and bench.again.keys() <= bench.answers.keys()):
                raise ValueError(f"{group} holds constraints that the table does not")
