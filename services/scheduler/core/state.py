"""The core's whole state, and the verbs that move one request: accept, admit, requeue, finish.

Everything that a request holds (slot, blocks, place in queue) is given back in `_vacate`, whatever the reason; every ending passes
`finish`, once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from libs.blocks import blocks_for
from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core.checking import Checking
from services.scheduler.core.checks import Check, Standing
from services.scheduler.core.counters import Counters
from services.scheduler.core.group import Group, rank_of
from services.scheduler.core.naming import private_names
from services.scheduler.core.plan import Effects
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.queue import Policy, WaitingQueue
from services.scheduler.core.request import CancelReason, Ending, Request, RequestEvent, RequestKey, RequestState, Residency, WaitReason
from services.scheduler.core.siblings import Siblings
from services.scheduler.core.stopping import FinishReason

# Ended requests, per request that may be live, whose place in the prefix cache's counters is remembered. A gateway that lost its session
# comes back within seconds, so this many outlast it unless all that is live ends several times a second.
_COUNTS_PER_LIVE = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and the whole scheduler may hold: `max_tokens_per_step` is the token budget.

    `enough_prefill`: once prompts take so many tokens of a step, no further one begins in it (0: only the budget ends that). It would hold
    back the first token of those before it, and on a device that is busy with one prompt nothing is computed faster for it.
    `max_requests` and `max_live_tokens` (prompt plus most output; 0: no bound) bound what is live, waiting or running.
    """

    max_tokens_per_step: int
    max_sequences: int
    max_requests: int
    max_model_len: int
    max_live_tokens: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    enough_prefill: int = 0


class SchedulerState:
    """All requests of a shard, the queue, and the groups they run on."""

    def __init__(self, limits: Limits, policy: Policy = Policy.FCFS) -> None:
        self.limits = limits
        self.requests: dict[RequestKey, Request] = {}
        self.policy = policy
        self.queue = WaitingQueue(policy)
        self.siblings = Siblings()
        self.checking = Checking()
        self.groups: dict[str, Group] = {}
        self.quarantine = Quarantine()
        self.counters = Counters()
        self._deadlines: list[tuple[int, int, Request]] = []
        self._arrivals = 0
        self.live_tokens = 0
        self._newcomers: dict[Request, None] = {}
        # Cached tokens of requests that were counted and have ended: where a gateway did not learn of it, its next attempt is not counted.
        self._counted: OrderedDict[RequestKey, int] = OrderedDict()

    @property
    def running(self) -> int:
        """Requests that stand in a group."""
        return sum(len(group.running) for group in self.groups.values())

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline of a live request."""
        while self._deadlines and self._deadlines[0][2].state is RequestState.ENDED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_arrival(self) -> int:
        """A number higher than that of every earlier arrival."""
        self._arrivals += 1
        return self._arrivals

    def capacity_tokens(self) -> int | None:
        """Longest sequence that some attached group can hold alone; None while there is none."""
        return max((group.capacity_tokens for group in self.groups.values()), default=None)

    def fits(self, request: Request) -> bool:
        """Whether an attached group, or any while there is none, can hold the request alone to its last token."""
        return not self.groups or any(group.holds(request) for group in self.groups.values())

    def is_isolated(self, group: Group) -> bool:
        """Whether `group` runs the suspects whose turn it is, and nobody else."""
        suspects = self.quarantine.suspects
        if not suspects:
            return False
        able = [name for name, other in self.groups.items() if self._could_run(other, suspects)]
        return self.quarantine.isolates(group.name, able)

    def _could_run(self, group: Group, suspects: Collection[Request]) -> bool:
        """Whether the group can hold the suspects, and has what some of them need compiled: those run first, the others after them."""
        return all(map(group.holds, suspects)) and any(self.checking.is_ready(request, group.name) for request in suspects)

    def accept(self, request: Request) -> Effects:
        """Takes a request into the queue, or beside it while its constraint is compiled; where that was refused of late, the request ends.

        Raises TokenloomError (CANNOT_FIT, PROMPT_TOO_LONG, QUEUE_FULL) and takes nothing otherwise.
        One that a client already reads goes on: it finds room, and where no group holds it, it waits for one that does (shelve_unfit).
        """
        effects = Effects()
        if request.stops.max_output < 1:
            limit, prompt = self.limits.max_model_len, len(request.prompt_ids)
            message = f"the prompt has {prompt} tokens; with one output token the limit is {limit}"
            raise TokenloomError(ErrorCode.PROMPT_TOO_LONG, message, param="prompt")
        if not request.attempt:
            if request.most_tokens > self.limits.max_model_len or not self.fits(request):
                raise self._cannot_fit(request)
            self._check_room(request)
        self.requests[request.key] = request
        self.live_tokens += request.most_tokens
        self.counters.admitted += 1
        if request.deadline_ns is not None:
            self._remember_deadline(request, request.deadline_ns)
        if not self.limits.prefix_caching:
            request.block_names = private_names(request.block_names, request.parent or request.key)
        if request.attempt and (cached := self._counted.pop(request.key, None)) is not None:
            request.cached_tokens, request.counted = cached, True
        if request.constraint is not None:
            request.check = self.checking.checks.want(request.constraint)
            # One copy of the text, however many requests came with it.
            request.constraint = replace(request.constraint, texts=request.check.constraint.texts)
        self._enqueue(request)
        self.fail_refused([request], request.timeline.received_ns, effects)
        return effects

    def _cannot_fit(self, request: Request) -> TokenloomError:
        length, capacity = self.limits.max_model_len, self.capacity_tokens()
        needs = f"prompt and max_tokens need {request.most_tokens} tokens of KV cache"
        return TokenloomError(ErrorCode.CANNOT_FIT, f"{needs}; a worker holds {min(length, capacity or length)}", param="max_tokens")

    def _enqueue(self, request: Request) -> None:
        """A child whose parent is still at the prompt waits for it, everybody else in the queue's order."""
        parent = self.requests.get(request.parent) if request.parent else None
        if parent is None or parent is request or parent.prompt_is_computed:
            self.place(request, request.timeline.received_ns)
            return
        self.queue.park(request)
        self.siblings.hold(request, parent)
        request.wait(WaitReason.PARENT_PROMPT, request.timeline.received_ns)

    def place(self, request: Request, now_ns: int) -> bool:
        """Puts a request that does not run where it waits, as things are: in the queue's order; parked while no group holds it; beside the
        queue while no group that does has its constraint. Whether no group holds it."""
        unfit = not self.fits(request)
        if not unfit and self._outlook(request) is not Standing.READY:
            if request.state is not RequestState.CHECKING:
                self.queue.discard(request)
                request.move(RequestState.CHECKING)
                self.checking.hold(request)
            request.wait(WaitReason.CHECKING if self.groups else WaitReason.NO_WORKER, now_ns)
            return False
        if request.state is RequestState.CHECKING:
            self.checking.discard(request)
            request.move(RequestState.WAITING)
            request.wait(WaitReason.NEW if self.groups else WaitReason.NO_WORKER, now_ns)
        if unfit:
            self.queue.park(request)
            request.wait(WaitReason.GROUP_TOO_SMALL, now_ns)
        elif request not in self.queue or self.queue.is_parked(request):
            self._newcomers[request] = None
            self.queue.push(request)
        return unfit

    def _able(self, request: Request) -> list[str]:
        """The groups that can hold the request."""
        return [name for name, group in self.groups.items() if group.holds(request)]

    def _outlook(self, request: Request) -> Standing:
        return Standing.READY if request.check is None else self.checking.outlook(request, self._able(request))

    def fail_refused(self, requests: Iterable[Request], now_ns: int, effects: Effects) -> None:
        """Ends those of the given requests whose constraint every group that could run them has refused."""
        for request in requests:
            if request.state is RequestState.CHECKING and self._outlook(request) is Standing.FAILED:
                error = self.checking.refusal(request, self._able(request))
                self.finish(request, Ending(FinishReason.FAILED, error=error), now_ns, effects)

    def recheck(self, now_ns: int, effects: Effects) -> None:
        """A group is gone with all that it had compiled: who needs a constraint that is ready nowhere any more is checked again."""
        for request in [*self.queue, *self.checking]:
            if request.check is not None and request.wait_reason is not WaitReason.PARENT_PROMPT:
                self.place(request, now_ns)
        self.fail_refused(list(self.checking), now_ns, effects)

    def release_children(self, parent: Request, now_ns: int) -> list[Request]:
        """The parent's prompt is computed, or it has ended: those who waited for that enter the queue. Returns them."""
        children = self.siblings.release(parent.key)
        for child in children:
            child.wait_reason = WaitReason.NEW if self.groups else WaitReason.NO_WORKER
            if child.check is not None:
                self.place(child, now_ns)
            else:
                self._newcomers[child] = None
                self.queue.push(child)
        return children

    def _check_room(self, request: Request) -> None:
        """Raises TokenloomError (QUEUE_FULL) when what is live leaves no room for one more."""
        limits = self.limits
        if len(self.requests) >= limits.max_requests:
            raise TokenloomError(ErrorCode.QUEUE_FULL, f"{len(self.requests)} requests are live, the limit", retry_after_ms=1000)
        # Alone it always has room: otherwise it could never be served.
        if limits.max_live_tokens and self.requests and self.live_tokens + request.most_tokens > limits.max_live_tokens:
            full = f"live requests may take {self.live_tokens} tokens, the limit is {limits.max_live_tokens}"
            raise TokenloomError(ErrorCode.QUEUE_FULL, full, retry_after_ms=1000)

    def mark_newcomers(self, now_ns: int) -> None:
        """Those who came since the last call and whom nobody looked at, because one before them must wait, learn it."""
        for request in self._newcomers:
            if request.state is RequestState.WAITING and request.wait_reason is WaitReason.NEW:
                request.wait(WaitReason.BEHIND, now_ns)
        self._newcomers.clear()

    def _remember_deadline(self, request: Request, deadline_ns: int) -> None:
        if len(self._deadlines) > 2 * len(self.requests):  # most of them have ended; a far deadline must not keep them in memory
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not RequestState.ENDED]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_ns, request.arrival, request))

    def admit(self, request: Request, group: Group, hits: list[int], computed: int, now_ns: int) -> list[int]:
        """Moves the head of the queue into `group`: hits first, then blocks for all known tokens. Returns the new blocks.

        The caller has made sure that a slot and the blocks are there.
        """
        self.queue.remove(request)
        group.ledger.hold(hits)
        fresh = group.ledger.allocate(blocks_for(request.known) - len(hits))
        group.admissions += 1
        slot = group.free_slots.pop()
        group.closing.discard(slot)
        rank = self.policy.rank(request, group.admissions)
        request.residency = Residency(group.name, rank, slot, [*hits, *fresh], computed=computed, planned=computed, published=len(hits))
        request.move(RequestState.RUNNING)
        insort(group.running, request, key=rank_of)
        if request.prompt_is_computed:  # it resumes with output, and the cache has its whole prompt
            self.release_children(request, now_ns)
        self._count_admission(request, computed, now_ns)
        return fresh

    def _count_admission(self, request: Request, computed: int, now_ns: int) -> None:
        if request.was_admitted:
            self.counters.resumed += 1
            request.timeline.note(RequestEvent("resumed", now_ns, amount=computed))
            return
        request.was_admitted = True
        request.timeline.dispatched_ns = now_ns
        found = min(computed, len(request.prompt_ids))
        if request.parent is not None:  # the prompt of an HTTP request is looked up once: for its first choice
            self.counters.sibling_shared += found
        elif self.limits.prefix_caching and not request.counted and not request.needs_positions:
            request.cached_tokens, request.counted = found, True
            self.counters.prefix_queries += len(request.prompt_ids)
            self.counters.prefix_hits += found

    def requeue(self, request: Request, why: str, now_ns: int, waits: WaitReason | None = None) -> None:
        """Takes a running request back into the queue with all its confirmed tokens; its blocks are free once its batches are over.
        There it waits for `waits`; None: for its own tokens in flight, if there are any, else for its turn."""
        self._vacate(request)
        request.move(RequestState.WAITING)
        request.timeline.note(RequestEvent(why, now_ns))
        request.wait_reason = WaitReason.UNRESOLVED if request.unresolved else WaitReason.BEHIND
        request.wait(waits or request.wait_reason, now_ns)
        if why == "preempted":
            request.timeline.preemptions += 1
            self.counters.preemptions += 1
        self.queue.push(request)

    def finish(self, request: Request, ending: Ending, now_ns: int, effects: Effects) -> None:
        """Ends a live request; the only way out. Ending it twice is a bug and raises ValueError."""
        match request.state:
            case RequestState.CHECKING:
                self.checking.discard(request)
            case RequestState.WAITING:
                self.queue.remove(request)
            case _:
                self._vacate(request)
        request.move(RequestState.ENDED)
        request.ending = ending
        request.timeline.ended_ns = now_ns
        del self.requests[request.key]
        self.live_tokens -= request.most_tokens
        self._newcomers.pop(request, None)
        self.quarantine.discard(request)
        if request.check is not None:
            self.checking.checks.release(request.check)
        self.siblings.discard(request)
        children = self.release_children(request, now_ns)
        if request.counted:
            self._remember_count(request)
        match ending.reason:
            case FinishReason.CANCELLED | FinishReason.DEADLINE:
                self.counters.cancelled += 1
            case FinishReason.FAILED:
                self.counters.failed += 1
            case _:
                self.counters.finished += 1
        effects.ended.append(request)
        self.fail_refused(children, now_ns, effects)

    def _remember_count(self, request: Request) -> None:
        """What it was counted with is kept for its next attempt, should there be one: its ending may be lost with its session."""
        self._counted[request.key] = request.cached_tokens
        if len(self._counted) > _COUNTS_PER_LIVE * self.limits.max_requests:
            self._counted.popitem(last=False)

    def _vacate(self, request: Request) -> None:
        residency = request.residency
        if residency is None:
            raise ValueError(f"request {request.key} holds no place")
        group = self.groups[residency.group]
        group.ledger.release(residency.blocks, after_batch=group.last_touch(residency))
        group.free_slots.append(residency.slot)
        if residency.opened:
            group.closing.add(residency.slot)
        del group.running[bisect_left(group.running, residency.rank, key=rank_of)]
        request.residency = None

    def cancel(self, key: RequestKey, reason: CancelReason, now_ns: int) -> Effects:
        """Ends a request because somebody asked for it. An unknown one is counted and ignored."""
        effects, request = Effects(), self.requests.get(key)
        if request is None:
            self.counters.unknown_cancels += 1
            return effects
        why = FinishReason.DEADLINE if reason is CancelReason.TIMEOUT else FinishReason.CANCELLED
        self.finish(request, Ending(why, cancel=reason), now_ns, effects)
        return effects

    def expire(self, now_ns: int) -> Effects:
        """Ends every request whose deadline has passed."""
        effects = Effects()
        while (deadline := self.next_deadline_ns) is not None and deadline <= now_ns:
            request = heapq.heappop(self._deadlines)[2]
            self.finish(request, Ending(FinishReason.DEADLINE), now_ns, effects)
        return effects

    def fail_all(self, requests: Iterable[Request], error: TokenloomError, now_ns: int) -> Effects:
        """Ends the given live requests with an error."""
        effects = Effects()
        for request in list(requests):
            self.finish(request, Ending(FinishReason.FAILED, error=error), now_ns, effects)
        return effects

    def fail_unfit(self, now_ns: int) -> Effects:
        """Ends the waiting requests that no attached group can hold: those that could are gone, or came back smaller."""
        effects = Effects()
        for request in [request for request in self.queue if not self.fits(request)]:
            self.finish(request, Ending(FinishReason.FAILED, error=self._cannot_fit(request)), now_ns, effects)
        return effects

    def shelve_unfit(self, now_ns: int) -> bool:
        """Groups came or went: waiting requests that none holds leave the queue's order until one does. Whether there are any."""
        found = False
        for request in [*self.queue, *self.checking]:
            if request.wait_reason is not WaitReason.PARENT_PROMPT:
                found |= self.place(request, now_ns)
        return found

    def wait_all(self, reason: WaitReason, now_ns: int) -> None:
        """Gives every waiting request the same reason, but for those who wait for their parent: its reason is theirs."""
        for request in self.queue:
            if request.wait_reason is not WaitReason.PARENT_PROMPT:
                request.wait(reason, now_ns)
        for request in self.checking:
            request.wait(reason if reason is WaitReason.NO_WORKER else WaitReason.CHECKING, now_ns)

    def check(self) -> None:
        """Every invariant that ties the parts together, O(everything). Raises ValueError or LedgerError."""
        for group in self.groups.values():
            group.check()
        places = self.running + len(self.queue) + len(self.checking)
        if places != len(self.requests):
            raise ValueError(f"{len(self.requests)} live requests in {places} places")
        if self.live_tokens != sum(request.most_tokens for request in self.requests.values()):
            raise ValueError(f"{self.live_tokens} tokens are counted as live")
        self.siblings.check(self.requests)
        wanted: Counter[Check] = Counter(request.check for request in self.requests.values() if request.check is not None)
        self.checking.checks.check(wanted)
        counters = self.counters
        if counters.admitted != counters.finished + counters.failed + counters.cancelled + len(self.requests):
            raise ValueError(f"conservation is broken: {counters}, {len(self.requests)} live")
