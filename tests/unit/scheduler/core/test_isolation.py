"""Suspects of a failed batch in the planner: alone, in halves, on one worker or several, and never stranded."""

from __future__ import annotations

import pytest

from services.scheduler.core.apply import apply, lose_group
from services.scheduler.core.group import Group
from services.scheduler.core.planner import plan
from services.scheduler.core.request import Request, WaitReason
from services.scheduler.core.state import SchedulerState
from tests.support.core import add_group, make_state
from tests.unit.scheduler.core.outcomes import failed, not_run, ok, planned, step, submit


class TestIsolation:
    """Suspects of a failed batch run alone, in halves, and cannot be shut out."""

    def suspects(self, *, count: int = 4, **group_fields: int) -> tuple[SchedulerState, Group, list[Request]]:
        state = make_state()
        group = add_group(state, **group_fields)
        everyone = [submit(state, [number]) for number in range(1, count + 1)]
        apply(state, group, failed(planned(state, group)), 2)
        return state, group, everyone

    def test_the_first_half_runs_alone(self):
        state, group, everyone = self.suspects()
        assert [row.request for row in planned(state, group).rows] == everyone[:2]
        assert plan(state, group, 3) is None, "no batch is sent behind one of suspects"

    def test_the_cleared_half_waits_until_the_other_is_cleared_too(self):
        state, group, everyone = self.suspects()
        step(state, group)
        batch, _ = step(state, group)
        assert [row.request for row in batch.rows] == everyone[2:]
        assert everyone[0].wait_reason is WaitReason.QUARANTINE
        assert len(planned(state, group).rows) == 4

    def test_another_group_passes_the_suspects_over_and_serves_who_comes_behind_them(self):
        state, _, suspects = self.suspects()
        other = add_group(state, "g9")
        assert plan(state, other, 3) is None
        late = submit(state, [9])
        assert [row.request for row in planned(state, other).rows] == [late]
        assert {request.wait_reason for request in suspects} == {WaitReason.QUARANTINE}
        assert state.queue.peek() is suspects[0]

    def test_suspects_get_a_slot_on_a_group_that_was_full_without_them(self):
        state = make_state()
        lost, full = add_group(state, "g0", slots=2), add_group(state, "g1", slots=2)
        suspects = [submit(state, [1]), submit(state, [2])]
        planned(state, lost)
        others = [submit(state, [3]), submit(state, [4])]
        step(state, full)
        lose_group(state, lost, 4, crashed=True)
        ended: list[Request] = []
        for _ in range(60):
            step_plan = plan(state, full, 5)
            if step_plan is None:
                break
            ended += apply(state, full, ok(step_plan), 5).ended
        assert set(ended) == {*suspects, *others}

    def test_suspects_that_moved_to_another_worker_are_not_stranded_when_theirs_returns(self):
        state = make_state()
        lost, other = add_group(state, "g0"), add_group(state, "g1")
        suspects = [submit(state, [1]), submit(state, [2])]
        planned(state, lost)
        lose_group(state, lost, 4, crashed=True)
        on_other = planned(state, other)
        back = add_group(state, "g0", epoch=2)
        assert plan(state, back, 5) is None
        apply(state, other, ok(on_other), 5)
        assert [row.request for row in planned(state, other).rows] == suspects[1:] or plan(state, back, 6) is not None
        self.finish(state)

    def test_two_workers_that_fail_together_strand_nobody(self):
        state = make_state()
        groups = [add_group(state, "g0"), add_group(state, "g1")]
        batches = []
        for group in groups:
            for number in range(1, 4):
                submit(state, [number])
            batches.append(planned(state, group))
        for group, batch in zip(groups, batches, strict=True):
            apply(state, group, failed(batch), 2)
        self.finish(state)

    def test_a_second_failure_while_suspects_run_elsewhere_strands_nobody(self):
        state = make_state()
        first, second = add_group(state, "g0"), add_group(state, "g1")
        for number in range(1, 4):
            submit(state, [number])
        batch = planned(state, first)
        for number in range(4, 7):
            submit(state, [number])
        other = planned(state, second)
        apply(state, first, failed(batch), 2)
        step(state, first)
        apply(state, second, failed(other), 3)
        self.finish(state)

    @staticmethod
    def finish(state: SchedulerState) -> None:
        """All that is in flight succeeds from now on: every request must come to its end."""
        for _ in range(200):
            for group in state.groups.values():
                plan(state, group, 9)
                if group.in_flight:
                    apply(state, group, ok(group.in_flight[0]), 9)
            state.check()
            if not state.requests:
                return
        pytest.fail(f"stranded: {[(str(r.key), r.state, r.wait_reason) for r in state.requests.values()]}")


def failed_with_another_behind(state: SchedulerState, group: Group) -> tuple[Request, Request]:
    """A batch that failed held both; the one sent behind it, which was not run, only the first."""
    lasting = submit(state, [1], max_tokens=50)
    step(state, group)
    brief = submit(state, [2], max_tokens=1)
    first, second = planned(state, group), planned(state, group)
    assert [[row.request for row in batch.rows] for batch in (first, second)] == [[lasting, brief], [lasting]]
    apply(state, group, failed(first), 2)
    return lasting, brief


@pytest.mark.parametrize("crashed", [True, False])
def test_a_worker_that_dies_of_a_failed_batch_leaves_that_batch_suspect_and_not_the_one_behind(crashed: bool):
    state = make_state()
    group = add_group(state)
    lasting, brief = failed_with_another_behind(state, group)
    lose_group(state, group, 3, crashed=crashed)
    group = add_group(state, epoch=2)
    for alone in (lasting, brief):
        assert list(state.quarantine.suspects) == [alone]
        step(state, group)
    assert (lasting.crashes, brief.crashes) == (0, 0)


def test_who_kills_the_worker_with_its_only_row_each_time_is_convicted_and_not_its_neighbour():
    state = make_state()
    group = add_group(state)
    lasting, brief = failed_with_another_behind(state, group)
    ended = lose_group(state, group, 3, crashed=True).ended
    for epoch in range(2, 30):
        if ended:
            break
        group = add_group(state, epoch=epoch)
        while not ended and (batch := plan(state, group, epoch)) is not None:
            if any(row.request is brief for row in batch.rows):
                ended = lose_group(state, group, epoch, crashed=True).ended
                break
            ended = apply(state, group, ok(batch), epoch).ended
    assert ended == [brief]
    assert lasting.key in state.requests


def test_nobody_is_suspect_of_a_batch_that_the_worker_refused_to_run():
    state = make_state()
    group = add_group(state)
    submit(state, [1], max_tokens=50)
    step(state, group)
    first, _ = planned(state, group), planned(state, group)
    apply(state, group, not_run(first), 2)
    lose_group(state, group, 3, crashed=True)
    assert not state.quarantine.suspects
