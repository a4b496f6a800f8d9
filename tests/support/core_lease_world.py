"""The world's events that only leases know (steps that begin before they end, cuts on their way), and answers that go astray."""

from __future__ import annotations

import itertools

from services.scheduler.convert import to_cut
from services.scheduler.core.apply import apply, close
from services.scheduler.core.group import Group
from services.scheduler.core.leases import cut, open_lease, wants_cut
from services.scheduler.core.plan import Cut, StepOutcome
from tests.support.core_shapes import Rig
from tests.support.core_world import World


class LeaseWorld(World):
    """See the module. In worlds that grant no leases these events do nothing."""

    def begin(self, number: int) -> None:
        """A worker's next step starts; its end is another event."""
        rig = self.pick(number)
        if rig is not None:
            self.say(rig, rig.runner.begin())
            self.check()

    def cut_if_wanted(self, number: int) -> None:
        """What the shell does after every event: it asks for a lease's end if that is in somebody's way."""
        rig = self.pick(number)
        if rig is not None and wants_cut(self.state, rig.group):
            self._ask(rig)
            self.seen["cut that was wanted"] += 1

    def cut(self, number: int) -> None:
        """The shell asks for a lease's end, needed or not."""
        rig = self.pick(number)
        if rig is not None:
            self._ask(rig)

    def _ask(self, rig: Rig) -> None:
        lease = open_lease(rig.group)
        asked = cut(rig.group)
        assert (asked is None) == (lease is None or lease.first in rig.asked), "a cut is asked for once, and only if it can help"
        if asked is not None and lease is not None:
            assert lease.first <= asked.last_step <= lease.last
            rig.cuts.append(asked)
            rig.asked.add(asked.number)
            self.seen["cut"] += 1
        self.check()

    def cut_arrives(self, number: int) -> None:
        """A cut reaches its worker, whatever has become of the lease."""
        rig = self.pick(number)
        if rig is not None and rig.cuts:
            asked = rig.cuts.popleft()
            said = rig.runner.cut(to_cut(asked))
            granted = rig.plans[asked.number].steps + asked.number - 1
            self.seen["cut after the lease's end"] += bool(said) and said[0].closed.last_step == granted
            self.say(rig, said)
            self.check()

    def lose_cut(self, number: int) -> None:
        """A worker ignores a cut: the lease runs to its end."""
        rig = self.pick(number)
        if rig is not None and rig.cuts:
            rig.cuts.popleft()
            self.seen["cut ignored"] += 1

    def delay_closed(self, number: int) -> None:
        """The answer to a cut is overtaken by the result behind it."""
        rig = self.pick(number)
        if rig is None:
            return
        answers = list(rig.answers)
        for place, (first, second) in enumerate(itertools.pairwise(answers)):
            if isinstance(first, Cut) and isinstance(second, StepOutcome):
                rig.answers[place], rig.answers[place + 1] = second, first
                self.seen["closed overtaken"] += 1
                return

    def closed_again(self, number: int) -> None:
        """An answer to a cut that was heard, or that a lost stream owed, arrives again; if it can be, one with the number of a lease that
        is open now."""
        old = [(name, closed) for name, closed in self.stale_closed if name in self.rigs]
        current = {name: lease.first for name, rig in self.rigs.items() if (lease := open_lease(rig.group))}
        likely = [(name, closed) for name, closed in old if closed.number == current.get(name)]
        if old:
            name, closed = (likely or old)[number % len(likely or old)]
            self.seen["closed again, right number"] += bool(likely)
            self._hear_closed_in_vain(self.rigs[name].group, closed)

    def closed_unasked(self, number: int) -> None:
        """A worker closes a lease that nobody asked it to: that is not how leases end."""
        rig = self.pick(number)
        lease = open_lease(rig.group) if rig is not None else None
        if rig is not None and lease is not None and lease.first not in rig.asked:
            self.seen["closed unasked"] += 1
            self._hear_closed_in_vain(rig.group, Cut(rig.group.epoch, lease.first, rig.group.in_flight[0].number))

    def hear_old(self, number: int) -> None:
        """An answer that was heard, or that a lost stream owed, arrives again; if it can be, one with the number that is waited for."""
        old = [(name, answer) for name, answer in self.stale if name in self.rigs]
        heads = {name: rig.group.in_flight[0].number for name, rig in self.rigs.items() if rig.group.in_flight}
        likely = [(name, answer) for name, answer in old if answer.number == heads.get(name)]
        if old:
            name, answer = (likely or old)[number % len(likely or old)]
            self.seen["stale epoch, right number"] += bool(likely)
            self._hear_in_vain(self.rigs[name].group, answer)

    def hear_early(self, number: int) -> None:
        """The answer behind the oldest one arrives before it: it counts for nothing until its turn."""
        rig = self.pick(number)
        if rig is not None and len(rig.answers) > 1:
            first, second = rig.answers[0], rig.answers[1]
            if isinstance(first, StepOutcome) and isinstance(second, StepOutcome):
                self.seen["reordered"] += 1
                self._hear_in_vain(rig.group, second)

    def _hear_in_vain(self, group: Group, answer: StepOutcome) -> None:
        before, in_flight = self.state.counters.stale_results, list(group.in_flight)
        effects = apply(self.state, group, answer, self.now)
        assert not effects.deltas, "an old answer brought tokens"
        assert not effects.ended, "an old answer ended somebody"
        assert list(group.in_flight) == in_flight
        assert self.state.counters.stale_results == before + 1
        self.seen["stale"] += 1
        self.check()

    def _hear_closed_in_vain(self, group: Group, closed: Cut) -> None:
        before, in_flight = self.state.counters.stale_closed, list(group.in_flight)
        effects = close(self.state, group, closed, self.now)
        assert not effects.deltas
        assert not effects.ended, "an old answer to a cut ended somebody"
        assert list(group.in_flight) == in_flight, "an old answer to a cut withdrew steps"
        assert self.state.counters.stale_closed == before + 1
        self.seen["closed in vain"] += 1
        self.check()
