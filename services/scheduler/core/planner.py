"""What runs in a group's next step, and why the rest waits.

Three limits close the gap between what is computed and what is known: the token budget, sequences per step, and free blocks. Decodes come
first (each is one token, and a client waits for it), then prompts that have begun, both in the order of their ranks, then the queue, until
prompts have their share of the budget.
Chunked prefill after Agrawal et al. 2024 ("Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"); continuous batching
after Yu et al. 2022 ("Orca").

Why every request comes to its end (PROTOCOL.md rule 12). A request's rank among those that run in a group is fixed when it is admitted:
(priority or 0, order of admission). Rows take blocks in that order, and a victim of preemption is the last, so never before its
beneficiary. The first is therefore nobody's victim but, alone, its own; that it fits the group alone was made sure at admission, so it
runs to its end. The first place changes hands without an ending only when somebody of a lower priority value is admitted, at most as
often as such requests arrive. Where requests of lower values never cease to arrive, others may wait for ever: that is the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libs.blocks import BLOCK_SIZE, blocks_for
from services.scheduler.core.group import Group
from services.scheduler.core.leases import can_dispatch, grant, lookup
from services.scheduler.core.ledger import Hit
from services.scheduler.core.plan import PlannedOpen, PlannedRow, StepPlan
from services.scheduler.core.request import Request, RequestEvent, RequestState, Residency, WaitReason
from services.scheduler.core.state import SchedulerState

# Requests that may be passed over in one step, and why: what they wait for is not in the way of others.
_MAX_ASIDE = 64
_PASSED_OVER = frozenset({WaitReason.PREFIX_IN_FLIGHT, WaitReason.QUARANTINE, WaitReason.GROUP_TOO_SMALL, WaitReason.CHECKING})
# Reasons that another step alone does not change: while all who wait have one of them, a lease is in nobody's way.
_LASTING = frozenset({WaitReason.NO_SLOT, WaitReason.NO_BLOCKS, WaitReason.GROUP_TOO_SMALL})


def plan(state: SchedulerState, group: Group, now_ns: int, most_steps: int = 1) -> StepPlan | None:
    """The next batch of `group`, or None when there is nothing to run or no batch may be sent now.

    Changes the state as if the batch were on its way: blocks are taken, `planned` advances, requests are admitted or preempted. Where all
    rows are decodes and nobody could enter soon, it is a lease of up to `most_steps` steps, whose first plan is returned.
    """
    isolated = state.is_isolated(group)
    if not can_dispatch(group) or group.broken or (isolated and group.in_flight):
        return None
    draft = _Draft(state, group, isolated, now_ns)
    draft.add_running()
    draft.admit_waiting()
    return draft.finish(most_steps)


class _Draft:
    """A batch in the making, with what is left of each limit."""

    def __init__(self, state: SchedulerState, group: Group, isolated: bool, now_ns: int) -> None:
        self._state, self._group, self._isolated, self._now = state, group, isolated, now_ns
        self._budget = min(state.limits.max_tokens_per_step, group.most_tokens or state.limits.max_tokens_per_step)
        self._enough, self._prefilled = state.limits.enough_prefill or self._budget, 0
        self._distance, self._suspicious = group.feed_forward_distance, bool(state.quarantine.suspects)
        # With nothing in flight every request is far enough from its last batch, and the numbers must say so.
        self._number = group.last_number + (1 if group.in_flight else group.feed_forward_distance)
        self._plan = StepPlan(group.name, group.epoch, self._number, group.chain_head, planned_ns=now_ns)
        # Whether somebody who waits may be admitted by the next step already.
        self._soon = False

    def finish(self, most_steps: int) -> StepPlan | None:
        """The plan, entered into the group's chain; None when there is nothing to tell the worker.

        Slots to be closed ride with the next rows; with none in sight they travel alone, so that an idle worker does not hold them.
        """
        group, counters = self._group, self._state.counters
        if not self._plan.rows and (not group.closing or group.in_flight):
            return None
        self._plan.closes = sorted(group.closing)
        group.closing.clear()
        later = grant(group, self._plan, most_steps) if most_steps > 1 and self._may_lease() else []
        group.last_number = group.chain_head = self._number + len(later)
        group.in_flight.append(self._plan)
        group.in_flight.extend(later)
        counters.steps += bool(self._plan.rows)
        counters.mixed_steps += self._plan.is_mixed
        counters.leases += bool(later)
        return self._plan

    def _may_lease(self) -> bool:
        """Whether the same rows may run several steps on end: all decode, everybody who runs is among them, and nobody waits for a step."""
        rows = self._plan.rows
        if self._soon or self._suspicious or self._distance > 1 or not rows or any(row.prefill for row in rows):
            return False
        planned = (request.residency for request in self._group.running if request.remaining)
        return all(residency is not None and residency.last_batch == self._number for residency in planned)

    def add_running(self) -> None:
        """Rows for the requests that run already: decodes, then prefills, both in the order of their ranks."""
        prefills: list[Request] = []
        for request in list(self._group.running):
            residency = request.residency  # None: it was preempted a moment ago
            if residency is None or not (remaining := request.remaining):
                continue
            if remaining > 1 or residency.planned < len(request.prompt_ids):
                prefills.append(request)
            else:
                self._advance(request, residency, remaining, prefill=False)
        for request in prefills:
            if request.residency is not None:
                self._advance(request, request.residency, request.remaining, prefill=True)

    def _may_run(self, request: Request) -> bool:
        return self._state.quarantine.may_run(request, isolated=self._isolated)

    def _advance(self, request: Request, residency: Residency, remaining: int, *, prefill: bool) -> None:
        """A row for a running request, or why it has none."""
        if self._suspicious and not self._may_run(request):
            request.wait(WaitReason.QUARANTINE, self._now)
            return
        count = remaining if remaining <= self._budget else self._chunk(remaining)
        if not count:
            request.wait(WaitReason.TOKEN_BUDGET, self._now)
            return
        if self._number - residency.last_batch < self._distance and residency.last_batch:
            return
        fresh: Sequence[int] = ()
        if residency.planned + count > len(residency.blocks) * BLOCK_SIZE:
            missing = blocks_for(residency.planned + count) - len(residency.blocks)
            if not self._make_room(request, residency, missing):
                return
            fresh = self._group.ledger.allocate(missing)
            residency.blocks.extend(fresh)
        self._add_row(request, residency, count, fresh, sample=count == remaining, prefill=prefill)

    def _chunk(self, wanted: int) -> int:
        """Tokens of `wanted` that fit the budget; without chunked prefill all or none."""
        if wanted <= self._budget:
            return wanted
        return self._budget if self._state.limits.chunked_prefill else 0

    def _make_room(self, request: Request, residency: Residency, missing: int) -> bool:
        """Frees blocks for a running request by preempting later ones. False: it skips this step, or was itself preempted."""
        ledger = self._group.ledger
        while ledger.available < missing:
            if ledger.available + ledger.draining >= missing:
                request.wait(WaitReason.DRAINING_BLOCKS, self._now)
                return False
            last = self._group.running[-1]
            self._state.requeue(last, "preempted", self._now, WaitReason.NO_BLOCKS)
            if last is request:
                return False
        return True

    def _add_row(self, request: Request, residency: Residency, count: int, fresh: Sequence[int], *, sample: bool, prefill: bool) -> None:
        start = residency.planned
        end = start + count
        named = self._name_full_blocks(request, residency, end) if end >= (residency.published + 1) * BLOCK_SIZE else ()
        self._plan.rows.append(PlannedRow(request, residency, start, count, sample, fresh, named, prefill))
        residency.planned, residency.last_batch = end, self._number
        request.unresolved += 1
        request.unresolved_samples += sample
        request.timeline.steps += 1
        if prefill:
            self._prefilled += count
            request.timeline.chunks += 1
            request.timeline.note(RequestEvent("chunk", self._now, amount=count))
        self._budget -= count

    def _name_full_blocks(self, request: Request, residency: Residency, end: int) -> Sequence[tuple[int, bytes]]:
        first, last = residency.published, min(end // BLOCK_SIZE, len(request.block_names))
        if first >= last:
            return ()
        named = list(zip(residency.blocks[first:last], request.block_names[first:last], strict=True))
        for block, name in named:
            self._group.ledger.name_pending(block, name, self._number)
        residency.published = last
        return named

    def admit_waiting(self) -> None:
        """Admits from the queue while all three limits allow it; who must wait learns why."""
        aside: list[Request] = []
        for request in self._candidates(aside):
            reason = self._admit(request)
            if reason is None:
                continue
            request.wait(reason, self._now)
            self._soon = self._soon or reason not in _LASTING
            if reason not in _PASSED_OVER or len(aside) >= _MAX_ASIDE:
                break
            self._state.queue.remove(request)
            aside.append(request)
        for request in aside:
            self._state.queue.push(request)
        self._state.mark_newcomers(self._now)

    def _candidates(self, aside: list[Request]) -> Iterator[Request]:
        """Waiting requests in the order in which they may be admitted."""
        if self._isolated:
            waiting = (request for request in self._state.quarantine.suspects if request.state is RequestState.WAITING)
            yield from (request for request in list(waiting) if request not in aside)
            return
        while (request := self._state.queue.peek()) is not None:
            yield request

    def _admit(self, request: Request) -> WaitReason | None:
        """Admits one request and plans its first row; otherwise says why not, and nothing has changed."""
        if not self._may_run(request):
            return WaitReason.QUARANTINE
        if request.unresolved:
            return WaitReason.UNRESOLVED
        if not self._group.holds(request):
            return WaitReason.GROUP_TOO_SMALL
        if not self._state.checking.is_ready(request, self._group.name):
            return WaitReason.CHECKING
        if self._budget < 1 or self._prefilled >= self._enough:
            return WaitReason.TOKEN_BUDGET
        if not self._make_slot():
            return WaitReason.NO_SLOT
        hit = lookup(self._state, self._group, request)
        if hit.next_is_pending:
            return WaitReason.PREFIX_IN_FLIGHT
        computed = len(hit.blocks) * BLOCK_SIZE
        count = self._chunk(request.known - computed)
        if not count:
            return WaitReason.TOKEN_BUDGET
        lacking = self._lacks_blocks(request, hit)
        if lacking is not None:
            return lacking
        self._open(request, hit.blocks, computed, count)
        return None

    def _make_slot(self) -> bool:
        """Whether a slot is free. Suspects whose turn it is take one from those who must not run meanwhile."""
        group = self._group
        if group.free_slots and len(group.running) < self._state.limits.max_sequences:
            return True
        return self._isolated and self._preempt_frozen()

    def _preempt_frozen(self) -> bool:
        """Sends the last one of those who must not run now back to the queue; False: there is none."""
        frozen = next((other for other in reversed(self._group.running) if not self._may_run(other)), None)
        if frozen is None:
            return False
        self._state.requeue(frozen, "preempted", self._now, WaitReason.QUARANTINE)
        return True

    def _lacks_blocks(self, request: Request, hit: Hit) -> WaitReason | None:
        """Why the blocks for all known tokens cannot be had now; None: they can. Others that run keep a small reserve to grow into."""
        ledger = self._group.ledger
        needed = blocks_for(request.known) - len(hit.blocks) + self._group.reserve
        while ledger.spare_without(hit.blocks) < needed:
            if ledger.spare_without(hit.blocks) + ledger.draining >= needed:
                return WaitReason.DRAINING_BLOCKS
            if not self._preempt_frozen():
                return WaitReason.NO_BLOCKS
        return None

    def _open(self, request: Request, hits: list[int], computed: int, count: int) -> None:
        self._state.admit(request, self._group, hits, computed, self._now)
        residency = request.residency
        if residency is None:
            raise ValueError(f"request {request.key} was admitted without a place")
        residency.opened = True
        constraint = self._state.checking.checks.id_in(request.check, self._group.name) if request.check is not None else 0
        self._plan.opens.append(PlannedOpen(request, residency, computed, tuple(residency.blocks), constraint))
        self._add_row(request, residency, count, (), sample=computed + count == request.known, prefill=True)
