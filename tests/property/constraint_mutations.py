"""The rules about constraints in the scheduler's core (PROTOCOL.md rule 31), each with an edit that breaks it."""

from __future__ import annotations

from tests.property.mutation import Mutation

CONSTRAINT_MUTATIONS = [
    Mutation(
        "a request starts where its constraint is not compiled",
        "31: in a step the mask never waits for a compile",
        "planner",
        "        if not self._state.checking.is_ready(request, self._group.name):\n            return WaitReason.CHECKING\n",
        "",
        quick=True,
    ),
    Mutation(
        "who is checked stands in the queue",
        "31: checking comes before the queue, out of everybody's way",
        "state",
        "        if not unfit and self._outlook(request) is not Standing.READY:\n",
        "        if False:\n",
    ),
    Mutation(
        "a new group is not asked",
        "31: a group that comes later compiles what live requests want",
        "checks",
        "            wanted = {check: None for check in self._table.values() if check.wanted}\n",
        "            wanted = dict[Check, None]()\n",
    ),
    Mutation(
        "what a lost group had compiled counts on",
        "4, 31: all that a worker holds is a cache, and goes with it",
        "apply",
        "    state.checking.checks.lose(group.name)\n",
        "",
    ),
    Mutation(
        "one group's refusal is everybody's",
        "31: a request runs where its constraint is ready",
        "checking",
        "        if Standing.READY in found:\n            return Standing.READY\n",
        "",
    ),
    Mutation(
        "a refusal ends nobody",
        "12, 19: who waits for what will not come ends",
        "preparing",
        "        state.fail_refused(waiting, now_ns, effects)\n    return heard",
        "        pass\n    return heard",
    ),
    Mutation(
        "an answer that never comes is waited for",
        "33: every wait has a bound",
        "checks",
        "                if now_ns - max(since, bench.heard_ns) < PATIENCE_NS and now_ns - since < LONGEST_NS:\n",
        "                if True:\n",
    ),
    Mutation(
        "a busy group is never asked again",
        "12: progress of those who resume",
        "checks",
        "                bench.unasked[check] = None\n        return failed",
        "                pass\n        return failed",
    ),
    Mutation(
        "who resumes fails because a group is busy",
        "20: resumed requests bypass",
        "checking",
        "        patient = Standing.BUSY in found and request.is_resumed\n",
        "        patient = False\n",
    ),
    Mutation(
        "a constraint is forgotten while an open in flight names it",
        "2, 31: an open names what is there",
        "checks",
        "            if (sent if step is None else step) <= settled:\n",
        "            if True:\n",
    ),
    Mutation(
        "a constraint is forgotten while somebody wants it",
        "31: never one that a live request wants",
        "checks",
        "        check.wanted -= 1\n        if check.wanted:\n            return\n",
        "        check.wanted -= 1\n",
    ),
    Mutation(
        "an answer counts twice",
        "25: what was withdrawn, or answered, is nobody's",
        "checks",
        "        check = bench.asked.pop(ask, None) if bench is not None else None\n",
        "        check = bench.asked.get(ask) if bench is not None else None\n",
    ),
    Mutation(
        "the quarantine waits for a group that cannot run its suspects",
        "12: progress",
        "state",
        " and any(self.checking.is_ready(request, group.name) for request in suspects)\n",
        "\n",
    ),
    Mutation(
        "an ended request's constraint stays wanted",
        "33: every table has a bound",
        "state",
        "            self.checking.checks.release(request.check)\n",
        "            pass\n",
    ),
]
