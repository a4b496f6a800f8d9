"""What groups answer about constraints, and what they must be told: the verbs that change the state (checking.py and checks.py keep it)."""

from __future__ import annotations

from libs.errors import TokenloomError
from services.scheduler.core.checks import Heard, Orders
from services.scheduler.core.group import Group
from services.scheduler.core.plan import Effects
from services.scheduler.core.state import SchedulerState


def orders(state: SchedulerState, group: Group, now_ns: int) -> Orders:
    """What the group must be told now about constraints: to compile those that live requests want, to forget what nobody will name."""
    settled = group.in_flight[0].number - 1 if group.in_flight else group.last_number
    return state.checking.checks.orders(group.name, now_ns, sent=group.last_number, settled=settled)


def prepared(state: SchedulerState, group: Group, ask: int, error: TokenloomError | None, now_ns: int) -> tuple[Heard | None, Effects]:
    """A group's answer: who waited for it enters the queue, or fails if no group is left that could have it.

    A late, duplicate or unknown answer (None) is counted and ignored.
    """
    effects, heard = Effects(), state.checking.checks.answered(group.name, ask, error, now_ns)
    if heard is None:
        state.counters.stale_prepared += 1
        return None, effects
    waiting = state.checking.waiting_for(heard.check)
    if error is None:
        for request in waiting:
            state.place(request, now_ns)
    else:
        state.fail_refused(waiting, now_ns, effects)
    return heard, effects


def expire(state: SchedulerState, now_ns: int) -> Effects:
    """What time alone changes: a group that owes an answer for too long counts as having refused, one that was busy is asked again."""
    effects = Effects()
    state.counters.unanswered_prepares += len(state.checking.checks.expire(now_ns))
    state.fail_refused(list(state.checking), now_ns, effects)
    return effects
