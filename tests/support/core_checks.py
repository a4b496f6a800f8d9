"""What must hold in the scheduler's core after every event, said independently of how the core does it (rules of PROTOCOL.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libs.blocks import BLOCK_SIZE, blocks_for
from services.scheduler.core.checks import Standing
from services.scheduler.core.group import Group
from services.scheduler.core.ledger import BlockLedger
from services.scheduler.core.plan import PlannedOpen, StepPlan
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import Request, RequestState, Residency, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import FinishReason
from tests.support.core_clients import Client
from tests.support.model_worker import ModelWorker

# Reasons for which a waiting request lets later ones pass.
_LETS_PASS = frozenset(
    {WaitReason.PREFIX_IN_FLIGHT, WaitReason.QUARANTINE, WaitReason.GROUP_TOO_SMALL, WaitReason.PARENT_PROMPT, WaitReason.CHECKING}
)
# Reasons that one step more does not change.
_LETS_LEASE = frozenset({WaitReason.NO_SLOT, WaitReason.NO_BLOCKS, WaitReason.GROUP_TOO_SMALL})


class Ledgers:
    """What each block name stands for, and whether ledgers and workers agree about it."""

    def __init__(self) -> None:
        self._content: dict[bytes, list[int]] = {}

    def learn(self, names: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Remembers the names of a whole sequence's blocks."""
        for index, name in enumerate(names):
            self._content[name] = list(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])

    def check(self, ledger: BlockLedger, worker: ModelWorker, numbers: Sequence[int]) -> None:
        """Rules 7 and 8. `numbers`: the batches in flight."""
        for name, block in ledger._published.items():
            assert worker.blocks[block] == self._content[name], f"block {block} is published and holds something else"
        for index in ledger._pending.values():
            # A row that was not computed leaves its blocks' names to be withdrawn when the blocks have drained.
            assert ledger._blocks[index].pending in numbers or index in ledger._draining, "a block is pending for a batch that is over"
        for index in ledger._draining:
            assert ledger._blocks[index].until in numbers, "a block drains for a batch that is over"


def check_lease(state: SchedulerState, group: Group, step: StepPlan, most: int) -> None:
    """Rule 27: a lease that was just granted. Consecutive steps of the same decode rows, blocks for all of them, in nobody's way."""
    steps = [plan for plan in group.in_flight if plan.number >= step.number]
    assert [plan.number for plan in steps] == list(range(step.number, step.number + step.steps))
    assert 1 < step.steps <= most
    assert group.feed_forward_distance == 1, "rows stand in batches too close"
    assert [plan.predecessor for plan in steps[1:]] == [plan.number for plan in steps[:-1]]
    for index, plan in enumerate(steps):
        assert [(row.residency, row.start) for row in plan.rows] == [(row.residency, row.start + index) for row in step.rows]
        assert all(row.count == 1 and row.sample and not row.prefill for row in plan.rows)
        assert index == 0 or not (plan.opens or plan.closes or any(row.new_blocks or row.named for row in plan.rows))
    for row in step.rows:
        assert row.start + step.steps < len(row.request.prompt_ids) + row.request.stops.max_output, "leased past the last token"
        assert len(row.residency.blocks) >= blocks_for(row.start + step.steps), "leased without blocks"
    waiting = state.queue.peek()
    assert waiting is None or waiting.wait_reason in _LETS_LEASE, f"a lease while somebody waits for {waiting.wait_reason}"
    assert not state.quarantine.suspects
    idle = [request for request in group.running if request.remaining and request not in {row.request for row in step.rows}]
    assert not idle, "a lease without somebody who could run"


def _check_leases_in_flight(group: Group) -> int:
    """Rule 27: behind a lease whose end may still move there is nothing. How many batches are in flight."""
    steps = list(group.in_flight)
    for place, step in enumerate(steps[:-1]):
        lease = step.lease
        if lease is not None and step.number == lease.last and not lease.closed:
            assert place == 0, "a batch was sent behind a lease that could still be cut"
            assert not lease.asked, "a batch was sent behind a lease before the cut was answered"
    return len({id(step.lease or step) for step in steps})


def check_groups(groups: Mapping[str, tuple[Group, ModelWorker]], ledgers: Ledgers, seen: Counter[str]) -> None:
    """Every group against its worker and its batches in flight."""
    for group, worker in groups.values():
        numbers = [step.number for step in group.in_flight]
        assert _check_leases_in_flight(group) <= group.max_in_flight
        assert numbers == sorted(set(numbers))
        ledger = group.ledger
        ledgers.check(ledger, worker, [*numbers, *(step.settles for step in group.in_flight)])
        available = {*ledger._free, *ledger._cached}
        for step in group.in_flight:
            for row in step.rows:
                assert available.isdisjoint(row.residency.blocks), "a block that a batch in flight may touch may be given away"
        seen["pending"] += bool(ledger._pending)
        seen["draining"] += bool(ledger._draining)
        seen["shared"] += any(block.refs > 1 for block in ledger._blocks)
        seen["broken"] += group.broken


def check_progress_of_requests(state: SchedulerState) -> None:
    """Rule 1, and that what is said to be in flight is."""
    rows: Counter[Request] = Counter()
    samples: Counter[Request] = Counter()
    for group in state.groups.values():
        for step in group.in_flight:
            for row in step.rows:
                rows[row.request] += 1
                samples[row.request] += row.sample
    for request in state.requests.values():
        assert request.unresolved == rows[request], "rows in flight are miscounted"
        assert request.unresolved_samples == samples[request]
        residency = request.residency
        assert (residency is not None) == (request.state is RequestState.RUNNING)
        if residency is not None and not residency.void and not state.groups[residency.group].broken:
            assert residency.computed <= request.known
            assert residency.computed <= residency.planned <= request.known + request.unresolved_samples
            assert len(residency.blocks) >= blocks_for(residency.planned)


@dataclass(slots=True)
class Tally:
    """The counters, counted from outside."""

    admitted: int = 0
    steps: int = 0
    preemptions: int = 0
    resumed: int = 0
    queries: int = 0
    hits: int = 0
    shared: int = 0
    ends: Counter[FinishReason] = field(default_factory=Counter)
    _opened: set[Request] = field(default_factory=set)
    _counted: set[Request | None] = field(default_factory=set)

    def accept(self, request: Request, before: Client | None, *, may_forget: bool) -> None:
        """A request is accepted; `before`: its earlier attempt. What that one was counted with stays, however it ended."""
        self.admitted += 1
        earlier = before.request if before is not None else None
        if earlier is not None and earlier in self._counted:
            assert request.counted or may_forget, "a prompt will be counted once more"
        if request.counted:
            assert earlier is not None
            assert earlier in self._counted
            assert earlier.cached_tokens == request.cached_tokens
            self._counted.add(request)

    def open(self, entry: PlannedOpen, *, caching: bool) -> None:
        """An admission, the first one of its request or not. A prompt is looked up once: for its first choice, in its first attempt."""
        request = entry.request
        if request in self._opened:
            self.resumed += 1
            return
        self._opened.add(request)
        found = min(entry.computed, len(request.prompt_ids))
        if request.parent is not None:
            self.shared += found
        elif caching and request not in self._counted and request.sampling.prompt_logprobs is None:
            self._counted.add(request)
            assert request.cached_tokens == found
            self.queries += len(request.prompt_ids)
            self.hits += found

    def end(self, request: Request) -> None:
        """An ending."""
        assert request.ending is not None
        self.ends[request.ending.reason] += 1

    def check(self, state: SchedulerState, requests: Sequence[Request]) -> None:
        """That the core's counters say the same. `requests`: every request's current attempt."""
        counters = state.counters
        assert (counters.admitted, counters.steps, counters.preemptions) == (self.admitted, self.steps, self.preemptions)
        assert (counters.resumed, counters.sibling_shared) == (self.resumed, self.shared)
        assert (counters.prefix_queries, counters.prefix_hits) == (self.queries, self.hits)
        assert all(request in self._counted or not request.cached_tokens for request in requests)
        assert counters.cancelled == self.ends[FinishReason.CANCELLED] + self.ends[FinishReason.DEADLINE]
        assert counters.failed == self.ends[FinishReason.FAILED]
        assert counters.finished == sum(self.ends.values()) - counters.cancelled - counters.failed


def is_stuck_without_fault(state: SchedulerState, request: Request) -> bool:
    """Whether what must come first (the request, its parent, or the suspects whose turn it is) waits for something outside: a group
    that can hold it, or a group's answer about its constraint."""
    parent = state.requests.get(request.parent) if request.wait_reason is WaitReason.PARENT_PROMPT and request.parent else None
    if parent is not None:
        return is_stuck_without_fault(state, parent)
    suspects = state.quarantine.suspects
    if request.wait_reason is WaitReason.QUARANTINE and suspects:
        first = [request, *suspects]
        return not all(state.fits(each) for each in first) or all(_is_being_checked(state, suspect) for suspect in suspects)
    return not state.fits(request) or _is_being_checked(state, request)


def _is_being_checked(state: SchedulerState, request: Request) -> bool:
    """Whether a group owes an answer about its constraint, or will be asked again for a request that has the time."""
    if request.state is not RequestState.CHECKING or request.check is None:
        return False
    found = {state.checking.checks.standing(request.check, name) for name, group in state.groups.items() if group.holds(request)}
    assert Standing.READY not in found, "a request is checked though its constraint is ready"
    return Standing.ASKED in found or (Standing.BUSY in found and request.is_resumed)


class PlanWatch:
    """A group before a plan, to judge what the plan did to it."""

    def __init__(self, state: SchedulerState, group: Group) -> None:
        self._state, self._group = state, group
        self._isolated = state.is_isolated(group)
        self._before: list[tuple[Request, Residency]] = [(r, r.residency) for r in group.running if r.residency is not None]
        self._frozen = {r for r in group.running if not state.quarantine.may_run(r, isolated=self._isolated)}
        self._waiting = list(state.queue)
        self._spare = group.ledger.available + group.ledger.draining
        ends = ((residency, residency.planned + request.remaining) for request, residency in self._before)
        self._growth = sum(max(0, blocks_for(end) - len(residency.blocks)) for residency, end in ends)
        # Who stands in batches in flight, and who is known to in which.
        self._in_flight = Counter(row.request for g in state.groups.values() for step in g.in_flight for row in step.rows)
        self._samples = {request: request.unresolved_samples for request in state.requests.values()}
        self._last = {row.request: step.number for step in group.in_flight for row in step.rows}

    def check_victims(self) -> list[Request]:
        """Rule 12: a victim is later than everybody who stays; rule 7: nobody is preempted while draining blocks will do. Who was."""
        ranked = sorted(self._before, key=self._rank)
        victims = [request for request, residency in self._before if request.residency is not residency]
        # Suspects whose turn has not come give their place to anybody: where they stand they must not run.
        places = [place for place, (request, _) in enumerate(ranked) if request in victims and request not in self._frozen]
        if places:
            staying = [place for place, (request, _) in enumerate(ranked) if request not in victims]
            assert max(staying, default=-1) < min(places), "a victim came before its beneficiary"
            assert self._growth > self._spare, "somebody was preempted though draining blocks would do"
        return victims

    def _rank(self, place: tuple[Request, Residency]) -> tuple[int, int]:
        request, residency = place
        return (self._urgency(request), residency.rank[1])

    def _urgency(self, request: Request) -> int:
        return request.priority if self._state.policy is Policy.PRIORITY else 0

    def check_step(self, step: StepPlan, distance: int) -> None:
        """Budget, slots, rules 1 and 5, the feed-forward distance, the order of admission."""
        limits, group = self._state.limits, self._group
        assert step.tokens <= min(limits.max_tokens_per_step, group.most_tokens or limits.max_tokens_per_step)
        assert len(group.running) <= limits.max_sequences
        assert len({row.request.key for row in step.rows}) == len(step.rows), "a request stands twice in a batch"
        for row in step.rows:
            request = row.request
            assert row.start + row.count < len(request.prompt_ids) + request.stops.max_output, "planned past the last token"
            due = request.known + self._samples[request]
            assert row.start + row.count <= due
            assert row.sample == (row.start + row.count == due)
            assert limits.chunked_prefill or row.sample, "a prompt was split"
            assert request not in self._last or step.number - self._last[request] >= distance, "a request stands in batches too close"
        for entry in step.opens:
            assert not self._in_flight[entry.request], "admitted with rows in flight"
            assert len(entry.blocks) >= blocks_for(entry.request.known), "admitted without blocks for all known tokens"
        self._check_order([entry.request for entry in step.opens])

    def _check_order(self, admitted: Sequence[Request]) -> None:
        if self._isolated or not admitted:
            return
        last = max((self._urgency(request), request.arrival) for request in admitted)
        for request in self._waiting:
            if request.state is RequestState.WAITING and (self._urgency(request), request.arrival) < last:
                assert request.wait_reason in _LETS_PASS, f"overtaken while it waited for {request.wait_reason}"

    def check_hits(self, entry: PlannedOpen, names: Sequence[bytes]) -> None:
        """Rules 6, 8 and 11: the cache gave blocks with the request's own names, and left the last known token to be computed."""
        assert entry.computed % BLOCK_SIZE == 0
        assert entry.computed < entry.request.known
        hits = entry.computed // BLOCK_SIZE
        may_read = entry.request.cacheable and (self._state.limits.prefix_caching or entry.request.parent is not None)
        assert may_read or not hits, "the cache was read against orders"
        found = [self._group.ledger._blocks[block].name for block in entry.blocks[:hits]]
        assert found == list(names[:hits]), "hits under other names"
