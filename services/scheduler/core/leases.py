"""Multi-step leases (PROTOCOL.md rule 27): several decode steps of the same rows in one message, and when to ask for an early end.

    grant   planning: the later steps of a batch; blocks and `planned` advance for all of them at once
    cut     the shell asks the worker to end a lease after the step that runs, because somebody could use its place
    close   apply.close: the worker has said which step is the last; the plans behind it are withdrawn

Each step of a lease is a plan of its own in Group.in_flight and is answered like any other. What differs: nothing is planned behind a
lease whose end may still move, since its rows' lengths, and the step that the next batch must name, are not known until then.
"""

from __future__ import annotations

from libs.blocks import BLOCK_SIZE, blocks_for
from services.scheduler.core.group import Group
from services.scheduler.core.ledger import Hit
from services.scheduler.core.plan import Cut, Lease, PlannedRow, StepPlan
from services.scheduler.core.request import Request
from services.scheduler.core.state import SchedulerState


def open_lease(group: Group) -> Lease | None:
    """The lease in flight whose end may still move; None: there is none.

    The end stands once the worker has answered a cut, or, where none was asked for, once only the last step is left.
    """
    if not group.in_flight or (lease := group.in_flight[-1].lease) is None or lease.closed:
        return None
    return lease if lease.asked or len(group.in_flight) > 1 else None


def messages_in_flight(group: Group) -> int:
    """Batches without their last answer; a lease is one of them."""
    if not group.in_flight:
        return 0
    return sum(not plan.is_later for plan in group.in_flight) + group.in_flight[0].is_later


def can_dispatch(group: Group) -> bool:
    """Whether another batch may be sent before an answer comes."""
    return messages_in_flight(group) < group.max_in_flight and open_lease(group) is None


def grant(group: Group, plan: StepPlan, most_steps: int) -> list[StepPlan]:
    """Makes `plan`, whose rows are decodes, the first step of a lease of at most `most_steps`, and returns the later ones; none: it stays
    alone. Nobody's last token is passed, nobody is preempted, and the reserve of blocks stays.

    The later steps' blocks travel with the first. They stay the sequence's own when the lease is cut: it grows into them, and the worker
    has them in its block table.
    """
    ahead = _steps_ahead(group, plan, most_steps - 1)
    if ahead < 1:
        return []
    last = plan.number + ahead
    plan.lease = lease = Lease(plan.number, last, granted=last)
    for row in plan.rows:
        request, residency = row.request, row.residency
        missing = _missing_blocks(row, ahead)
        if missing > 0:
            fresh = group.ledger.allocate(missing)
            residency.blocks.extend(fresh)
            row.new_blocks = [*row.new_blocks, *fresh]
        residency.planned += ahead
        residency.last_batch = last
        request.unresolved += ahead
        request.unresolved_samples += ahead
    return [_later_step(plan, lease, index) for index in range(1, ahead + 1)]


def _steps_ahead(group: Group, plan: StepPlan, most: int) -> int:
    for row in plan.rows:
        request = row.request
        most = min(most, request.stops.max_output - len(request.output_ids) - request.unresolved_samples)
    spare = max(0, group.ledger.available - group.reserve)
    while most > 0 and sum(max(0, _missing_blocks(row, most)) for row in plan.rows) > spare:
        most //= 2
    return most


def _missing_blocks(row: PlannedRow, ahead: int) -> int:
    """Blocks that a row lacks for so many steps after its own; zero or less: none."""
    return blocks_for(row.residency.planned + ahead) - len(row.residency.blocks)


def _later_step(plan: StepPlan, lease: Lease, index: int) -> StepPlan:
    # No block is named: what fills it is sampled within the lease, and published with the result.
    rows = [PlannedRow(row.request, row.residency, row.start + index, 1, True, (), (), False) for row in plan.rows]
    number = plan.number + index
    return StepPlan(plan.group, plan.epoch, number, number - 1, rows, planned_ns=plan.planned_ns, lease=lease)


def wants_cut(state: SchedulerState, group: Group) -> bool:
    """Whether the open lease is in somebody's way: one of its rows runs for nobody, or a waiting request could be admitted."""
    lease = open_lease(group)
    if lease is None or lease.asked or group.broken:
        return False
    if state.quarantine.suspects or any(row.request.residency is not row.residency for row in group.in_flight[-1].rows):
        return True
    request = state.queue.peek()
    return request is not None and _could_enter(state, group, request)


def _could_enter(state: SchedulerState, group: Group, request: Request) -> bool:
    if request.unresolved or not group.holds(request) or not state.checking.is_ready(request, group.name):
        return True  # who waits for this very lease, or lets others pass, may be followed by somebody who fits
    if not group.free_slots or len(group.running) >= state.limits.max_sequences:
        return False
    hit, ledger = lookup(state, group, request), group.ledger
    return blocks_for(request.known) - len(hit.blocks) + group.reserve <= ledger.spare_without(hit.blocks) + ledger.draining


def cut(group: Group) -> Cut | None:
    """What to ask the worker for, so that the open lease ends after the step that runs now; None: there is nothing to ask, or it was."""
    lease = open_lease(group)
    if lease is None or lease.asked:
        return None
    lease.asked = True
    return Cut(group.epoch, lease.first, max(lease.first, group.in_flight[0].number))


def lookup(state: SchedulerState, group: Group, request: Request) -> Hit:
    """What the group's cache has of a request; nothing for one that needs the log-probabilities of every position."""
    # Without prefix caching names are private to a family: a child still finds its parent's blocks.
    if not request.cacheable or request.needs_positions or not (state.limits.prefix_caching or request.parent):
        return Hit([], False)
    # At least the last known token is computed: its logits are what the next token is drawn from.
    return group.ledger.lookup(request.block_names[: (request.known - 1) // BLOCK_SIZE])
