"""Breaks the scheduler's rules on purpose, one at a time, and shows that the property test notices.

`python -m tests.property.mutations [name ...]` copies the code to a temporary directory, edits it there, and runs the property test of the
core against it: every mutation must make it fail. Takes some seconds each; the ordinary suite only checks that each still applies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROPERTY_TEST = "tests/property/test_scheduler_core.py"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule of PROTOCOL.md that is broken by replacing `before` by `after` in `file`."""

    name: str
    rule: str
    file: str
    before: str
    after: str


_CORE = "services/scheduler/core/"
MUTATIONS = [
    Mutation(
        "blocks are free at once",
        "7: a block freed while a batch in flight may still touch it is draining until that batch's result",
        _CORE + "state.py",
        "after_batch=group.last_touch(residency)",
        "after_batch=0",
    ),
    Mutation(
        "unconfirmed blocks are published",
        "8: only full blocks of confirmed token ids are published; pending ones cannot be hit",
        _CORE + "ledger.py",
        "            block.name, block.pending = name, batch\n            self._pending[name] = index\n",
        "            block.name = name\n            self._published[name] = index\n",
    ),
    Mutation(
        "a failed batch keeps its names",
        "8: a failed batch withdraws what it was to publish",
        _CORE + "apply.py",
        "    group.ledger.withdraw(plan.number)\n",
        "    for row in plan.rows:\n        for block, name in row.named:\n            group.ledger.publish(block, name)\n",
    ),
    Mutation(
        "a failed row keeps its names",
        "8: only blocks that were computed are published",
        _CORE + "apply.py",
        "        if not row.residency.void:\n",
        "        if row.residency:\n",
    ),
    Mutation(
        "hits are not capped",
        "6: at least the last known token is computed",
        _CORE + "planner.py",
        "request.block_names[: (request.known - 1) // BLOCK_SIZE]",
        "request.block_names[: request.known // BLOCK_SIZE]",
    ),
    Mutation(
        "an earlier one is preempted",
        "12: a victim is always later than its beneficiary",
        _CORE + "planner.py",
        "            last = self._group.running[-1]\n",
        "            last = self._group.running[0]\n",
    ),
    Mutation(
        "results apply twice",
        "1: a result is resolved through the stored plan of its batch number",
        _CORE + "apply.py",
        "or outcome.number != group.in_flight[0].number:",
        "or outcome.number > group.in_flight[0].number:",
    ),
    Mutation(
        "rows are resolved through slots",
        "1: never through slots, which are reused",
        _CORE + "apply.py",
        "    for row, row_outcome, tokens in zip(plan.rows, outcome.rows, outcome.tokens, strict=True):\n",
        "    tenants = {other.residency.slot: other for other in group.running if other.residency}\n"
        "    for row, row_outcome, tokens in zip(plan.rows, outcome.rows, outcome.tokens, strict=True):\n"
        "        row.request = tenants.get(row.residency.slot, row.request)\n",
    ),
    Mutation(
        "unresolved requests are admitted",
        "1: a request with unresolved tokens is not admitted again",
        _CORE + "planner.py",
        "        if request.unresolved:\n            return WaitReason.UNRESOLVED\n",
        "",
    ),
    Mutation(
        "planned past the last token",
        "5: nothing is planned past prompt + max_tokens - 1",
        _CORE + "request.py",
        "        if residency is None or outputs >= self.stops.max_output:\n",
        "        if residency is None:\n",
    ),
    Mutation(
        "answers behind a failed batch are believed",
        "2: a batch runs only if its predecessor completed",
        _CORE + "planner.py",
        "if not group.can_dispatch or group.broken or",
        "if not group.can_dispatch or",
    ),
    Mutation(
        "what follows a row that did not run is believed",
        "3: each outcome maps to one ending or to a replan",
        _CORE + "apply.py",
        "    elif row.residency.void:\n        return\n",
        "",
    ),
    Mutation(
        "suspects find no slot",
        "12: progress",
        _CORE + "planner.py",
        "        return self._isolated and self._preempt_frozen()\n",
        "        return False\n",
    ),
    Mutation(
        "the pipeline waits for itself",
        "12: progress, with a feed-forward distance",
        _CORE + "planner.py",
        "(1 if group.in_flight else group.feed_forward_distance)",
        "1",
    ),
]


# A failure is enough; what the smallest one looks like is not asked.
_NO_SHRINKING = Mutation(
    "", "", PROPERTY_TEST, "max_examples=150,\n    phases=list(Phase),", "max_examples=600,\n    phases=[Phase.generate],"
)


def mutate(mutation: Mutation, root: Path) -> None:
    """Applies the mutation below `root`. Raises ValueError when the code it is about is not there exactly once."""
    path = root / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(f"{mutation.name}: its code is {text.count(mutation.before)} times in {mutation.file}")
    path.write_text(text.replace(mutation.before, mutation.after))


def is_caught(mutation: Mutation) -> bool:
    """Whether the property test fails on the mutated code."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("libs", "services", "tests"):
            shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        mutate(mutation, root)
        mutate(_NO_SHRINKING, root)
        command = [sys.executable, "-m", "pytest", PROPERTY_TEST, "-x", "--tb=line", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 1


def main() -> int:
    """Runs all mutations, or the named ones; the exit code is the number of those that went unnoticed."""
    chosen = [mutation for mutation in MUTATIONS if not sys.argv[1:] or mutation.name in sys.argv[1:]]
    missed = 0
    for mutation in chosen:
        caught = is_caught(mutation)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {mutation.name}  (rule {mutation.rule})", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
