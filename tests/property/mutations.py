"""Breaks the rules of the scheduler's core on purpose, one at a time, and shows that the property drive alone notices.

`python -m tests.property.mutations [name ...]` edits a copy of the core in a temporary directory and drives random events against it
(core_drive.py): every mutation must make the drive fail or hang. It prints a table and exits 1 when one survives. The ordinary suite
checks that each mutation still applies to the code, and runs a few of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# Events per seed and seeds that a mutation must outlive to count as missed. Most fall within the first hundred events.
EVENTS, SEEDS = 20_000, (1, 2, 3)
# Seconds after which a drive hangs; an unbroken one takes a tenth of it.
PATIENCE = 120


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule of PROTOCOL.md that is broken by replacing `before` by `after` in the core's `file`. `quick`: part of the ordinary suite."""

    name: str
    rule: str
    file: str
    before: str
    after: str
    quick: bool = False

    @property
    def path(self) -> str:
        """The file, relative to the repository."""
        return f"services/scheduler/core/{self.file}.py"


MUTATIONS = [
    Mutation(
        "rows are resolved through slots",
        "1: through the stored plan, never through slots, which are reused",
        "apply",
        "    for row, row_outcome, tokens in zip(plan.rows, outcome.rows, outcome.tokens, strict=True):\n",
        "    tenants = {other.residency.slot: other for other in group.running if other.residency}\n"
        "    for row, row_outcome, tokens in zip(plan.rows, outcome.rows, outcome.tokens, strict=True):\n"
        "        row.request = tenants.get(row.residency.slot, row.request)\n",
    ),
    Mutation(
        "results apply twice",
        "1: a result belongs to the batch whose number it bears",
        "apply",
        "or outcome.number != group.in_flight[0].number:",
        "or outcome.number > group.in_flight[0].number:",
    ),
    Mutation(
        "a stale epoch is accepted",
        "25: what a lost stream owed is nobody's",
        "apply",
        "if outcome.epoch != group.epoch or not group.in_flight",
        "if not group.in_flight",
    ),
    Mutation(
        "unresolved requests are admitted",
        "1: a request with unresolved tokens is not admitted again",
        "planner",
        "        if request.unresolved:\n            return WaitReason.UNRESOLVED\n",
        "",
        quick=True,
    ),
    Mutation(
        "a lost group's batches stay in flight",
        "1, 25: planned falls back to what is confirmed",
        "apply",
        "    for plan in group.in_flight:\n        _unresolve(plan)\n",
        "",
    ),
    Mutation(
        "planned is not rolled back",
        "2: after a failed batch everybody starts over from confirmed tokens",
        "apply",
        '    for request in list(group.running):\n        state.requeue(request, "batch_failed", now_ns)\n',
        "",
    ),
    Mutation(
        "answers behind a failed batch are believed",
        "2: a batch runs only if its predecessor completed",
        "planner",
        "if not group.can_dispatch or group.broken or",
        "if not group.can_dispatch or",
    ),
    Mutation(
        "a batch names no predecessor",
        "2: a batch names its predecessor",
        "planner",
        "group.last_number = group.chain_head = self._number",
        "group.last_number = self._number",
    ),
    Mutation(
        "an answer that does not fit its batch is believed",
        "2: a failed batch is replayed",
        "apply",
        "not group.broken and len(outcome.rows) == len(outcome.tokens) == len(plan.rows):",
        "not group.broken:",
    ),
    Mutation(
        "no void residency after a row that was not computed",
        "3: what follows a row that did not run means nothing",
        "apply",
        "            row.residency.void = True\n",
        "            pass\n",
        quick=True,
    ),
    Mutation(
        "what follows a row that did not run is believed",
        "3: each outcome maps to one ending or to a replan",
        "apply",
        "    elif row.residency.void:\n        return\n",
        "",
    ),
    Mutation(
        "a wrong number of tokens is believed",
        "3: a row returns what was planned",
        "apply",
        "    elif len(tokens) != row.sample:\n",
        "    elif False:\n",
    ),
    Mutation(
        "a complete constraint does not end its request",
        "3: each outcome maps to one ending or to a replan",
        "apply",
        "        if outcome is RowOutcome.CONSTRAINT_COMPLETE and",
        "        if False and",
    ),
    Mutation(
        "planned past the last token",
        "5: nothing is planned past prompt + max_tokens - 1",
        "request",
        "        if residency is None or outputs >= self.stops.max_output:\n",
        "        if residency is None:\n",
        quick=True,
    ),
    Mutation(
        "hits are not capped",
        "6: at least the last known token is computed",
        "planner",
        "request.block_names[: (request.known - 1) // BLOCK_SIZE]",
        "request.block_names[: request.known // BLOCK_SIZE]",
        quick=True,
    ),
    Mutation(
        "blocks are free at once",
        "7: a block freed while a batch in flight may still touch it is draining",
        "state",
        "after_batch=group.last_touch(residency)",
        "after_batch=0",
        quick=True,
    ),
    Mutation(
        "the last holder alone decides for how long a block drains",
        "7: for every batch in flight that may touch it",
        "ledger",
        "block.until = max(block.until, after_batch)",
        "block.until = after_batch",
    ),
    Mutation(
        "somebody is preempted though draining blocks will do",
        "7: then a row skips this step",
        "planner",
        "            if ledger.available + ledger.draining >= missing:\n"
        "                request.wait(WaitReason.DRAINING_BLOCKS, self._now)\n"
        "                return False\n",
        "",
    ),
    Mutation(
        "unconfirmed blocks are published",
        "8: only full blocks of confirmed token ids; pending ones cannot be hit",
        "ledger",
        "            block.name, block.pending = name, batch\n            self._pending[name] = index\n",
        "            block.name = name\n            self._published[name] = index\n",
        quick=True,
    ),
    Mutation(
        "pending is not withdrawn on failure",
        "8: a failed batch withdraws what it was to publish",
        "apply",
        "    group.ledger.withdraw(plan.number)\n",
        "",
    ),
    Mutation(
        "a failed batch publishes",
        "8: only blocks that were computed",
        "apply",
        "    group.ledger.withdraw(plan.number)\n",
        "    for row in plan.rows:\n        for block, name in row.named:\n            group.ledger.publish(block, name)\n",
    ),
    Mutation(
        "a failed row publishes",
        "8: only blocks that were computed",
        "apply",
        "        if not row.residency.void:\n",
        "        if row.residency:\n",
    ),
    Mutation(
        "a block in use is given away",
        "10: a writable block has exactly one holder",
        "ledger",
        "            self._cached.pop(index, None)\n            self._draining.pop(index, None)\n",
        "            self._draining.pop(index, None)\n",
    ),
    Mutation(
        "children do not wait",
        "10: children wait for the parent's prompt",
        "state",
        "        if parent is None or parent is request or parent.prompt_is_computed:\n",
        "        if True:\n",
        quick=True,
    ),
    Mutation(
        "children of a parent that ended wait for ever",
        "10, 12: they go on alone",
        "state",
        "        self.siblings.discard(request)\n        self.release_children(request)\n",
        "        self.siblings.discard(request)\n",
    ),
    Mutation(
        "without a prefix cache everybody's blocks are found",
        "11: within one namespace only",
        "state",
        "            request.block_names = private_names(request.block_names, request.parent or request.key)\n",
        "            pass\n",
    ),
    Mutation(
        "blocks for the first chunk only",
        "12: admission takes blocks for all known tokens",
        "state",
        "group.ledger.allocate(blocks_for(request.known) - len(hits))",
        "group.ledger.allocate(1)",
    ),
    Mutation(
        "hits count as spare blocks",
        "12: admission takes hits first, then blocks",
        "ledger",
        "return self.available - sum(block in self._cached for block in blocks)",
        "return self.available",
    ),
    Mutation(
        "an earlier one is preempted",
        "12: a victim is always later than its beneficiary",
        "planner",
        "            last = self._group.running[-1]\n",
        "            last = self._group.running[0]\n",
        quick=True,
    ),
    Mutation(
        "the order of admission knows no priority",
        "12: in an order fixed at admission: priority, then order",
        "queue",
        "return (request.priority if self is Policy.PRIORITY else 0, order)",
        "return (0, order)",
    ),
    Mutation(
        "the queue knows no priority",
        "12: who is next is decided by the policy",
        "queue",
        "Policy.PRIORITY: lambda request: (request.priority, request.arrival),",
        "Policy.PRIORITY: lambda request: (request.arrival,),",
    ),
    Mutation(
        "a preempted request goes to the end of the queue",
        "12: it comes back with the place of its arrival",
        "queue",
        "Policy.FCFS: lambda request: (request.arrival,),",
        "Policy.FCFS: lambda request: (),",
    ),
    Mutation(
        "suspects find no slot",
        "12: progress",
        "planner",
        "        return self._isolated and self._preempt_frozen()\n",
        "        return False\n",
    ),
    Mutation(
        "the pipeline waits for itself",
        "12, 24: progress, with a feed-forward distance",
        "planner",
        "(1 if group.in_flight else group.feed_forward_distance)",
        "1",
    ),
    Mutation(
        "a request stands in batches too close",
        "24: not closer than the feed-forward distance",
        "planner",
        "        if self._number - residency.last_batch < self._distance and residency.last_batch:\n            return\n",
        "",
    ),
    Mutation(
        "deltas have a wrong first index",
        "18: a delta carries its first output index",
        "apply",
        "    first = len(outputs)\n",
        "    first = max(0, len(outputs) - 1)\n",
    ),
    Mutation(
        "the tokens of an ended request go on",
        "19: the first ending wins",
        "apply",
        "        if row.request.state is ended:\n            continue\n",
        "",
        quick=True,
    ),
    Mutation(
        "an ending is told twice",
        "19: each request ends once",
        "state",
        "        effects.ended.append(request)\n",
        "        effects.ended += [request, request]\n",
    ),
    Mutation(
        "a finished request is not counted",
        "19: admitted = finished + failed + cancelled + live",
        "state",
        "                self.counters.finished += 1\n",
        "                pass\n",
    ),
    Mutation(
        "every admission counts as a look-up",
        "6, issue 3: counters count each prompt once",
        "state",
        '            request.timeline.note(RequestEvent("resumed", now_ns, amount=computed))\n            return\n',
        '            request.timeline.note(RequestEvent("resumed", now_ns, amount=computed))\n',
    ),
    Mutation(
        "every attempt counts as a look-up",
        "17, issue 3: counters count each prompt once, attempts are linked",
        "state",
        "        if request.counted and ending.cancel is CancelReason.SESSION_LOST:\n",
        "        if False:\n",
    ),
    Mutation(
        "slots are not closed",
        "4: slots are a cache, and an idle worker holds none",
        "state",
        "            group.closing.add(residency.slot)\n",
        "            pass\n",
    ),
    Mutation(
        "a slot is not given back",
        "12: progress",
        "state",
        "        group.free_slots.append(residency.slot)\n",
        "",
    ),
    Mutation(
        "the first crash alone convicts",
        "29: only a request that crashes alone, again and again, is poison",
        "quarantine",
        "if accused[0].crashes >= CRASHES_ALONE:",
        "if accused[0].crashes >= 1:",
    ),
    Mutation(
        "nobody is ever convicted",
        "29: a request that crashes alone is poison",
        "quarantine",
        "if accused[0].crashes >= CRASHES_ALONE:",
        "if False:",
    ),
    Mutation(
        "success clears nobody",
        "29: a half that succeeds is innocent",
        "quarantine",
        "                request.crashes = 0\n",
        "                pass\n",
    ),
    Mutation(
        "the token budget is a wish",
        "12: a step holds no more tokens than the budget",
        "planner",
        "        return self._budget if self._state.limits.chunked_prefill else 0\n",
        "        return wanted\n",
    ),
    Mutation(
        "prompts are split without chunked prefill",
        "12: all or none",
        "planner",
        "        return self._budget if self._state.limits.chunked_prefill else 0\n",
        "        return self._budget\n",
    ),
    Mutation(
        "deadlines pass unnoticed",
        "23: deadlines travel with the request",
        "state",
        "            self._remember_deadline(request, request.deadline_ns)\n",
        "            pass\n",
    ),
    Mutation(
        "who resumes finds no room",
        "20: resumed requests bypass",
        "state",
        "        if not request.attempt:  # one that a client already reads goes on\n            self._check_room(request)\n",
        "        self._check_room(request)\n",
    ),
    Mutation(
        "what fits nowhere waits for ever",
        "12: refused if no group can hold it",
        "state",
        "        for request in [request for request in self.queue if not self.fits(request)]:\n",
        "        for request in ():\n",
    ),
]


def mutate(mutation: Mutation, root: Path) -> None:
    """Applies the mutation below `root`. Raises ValueError when the code it is about is not there exactly once."""
    path = root / mutation.path
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(f"{mutation.name}: its code is {text.count(mutation.before)} times in {mutation.path}")
    path.write_text(text.replace(mutation.before, mutation.after))


def _copy(root: Path) -> None:
    """The repository below `root`: links, but for the scheduler, which is to be edited."""
    for name in ("libs", "tests"):
        (root / name).symlink_to(REPOSITORY / name)
    (root / "services").mkdir()
    for path in (REPOSITORY / "services").iterdir():
        if path.name != "scheduler":
            (root / "services" / path.name).symlink_to(path)
    shutil.copytree(REPOSITORY / "services" / "scheduler", root / "services" / "scheduler", ignore=shutil.ignore_patterns("__pycache__"))


def verdict(mutation: Mutation) -> str:
    """What the drive said of the mutated code: the last line of its failure; "" when it noticed nothing. Raises ValueError as `mutate`."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _copy(root)
        mutate(mutation, root)
        environment = {**os.environ, "PYTHONPATH": str(root)}
        for seed in SEEDS:
            command = [sys.executable, "-m", "tests.property.core_drive", "--events", str(EVENTS), "--seed", str(seed)]
            try:
                done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
            except subprocess.TimeoutExpired:
                return "it hangs"
            if done.returncode:
                return _reason(done.stderr)
    return ""


def _reason(stderr: str) -> str:
    """The error in a traceback's last lines, without the note that says which episode it was."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith((" ", "episode "))]
    return lines[-1] if lines else "it crashed"


def main() -> int:
    """Runs all mutations, or the named ones; the exit code is 1 when one went unnoticed."""
    chosen = [mutation for mutation in MUTATIONS if not sys.argv[1:] or mutation.name in sys.argv[1:]]
    missed = []
    for mutation in chosen:
        begun = time.monotonic()
        reason = verdict(mutation)
        if not reason:
            missed.append(mutation.name)
        print(f"{'caught' if reason else 'MISSED'} {time.monotonic() - begun:5.1f} s  {mutation.name}  ({mutation.rule})", flush=True)
        print(f"               {reason[:150]}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations caught" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
