"""Breaks rules of PROTOCOL.md on purpose, one at a time, and shows that the property drives alone notice.

`python -m tests.property.mutations [name ...]` edits a copy of the services in a temporary directory and drives random events against it
(core_drive.py, session_drive.py): every mutation must make the drive fail or hang. It prints a table and exits 1 when one survives. The
ordinary suite checks that each mutation still applies to the code, and runs a few of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.property.constraint_mutations import CONSTRAINT_MUTATIONS
from tests.property.core_mutations import CORE_MUTATIONS
from tests.property.lease_mutations import LEASE_MUTATIONS
from tests.property.logprobs_mutations import LOGPROBS_MUTATIONS
from tests.property.mutation import Mutation
from tests.property.session_mutations import SESSION_MUTATIONS

REPOSITORY = Path(__file__).parents[2]
# Events per seed and seeds that a mutation must outlive to count as missed. Most fall within the first hundred events.
EVENTS, SEEDS = 20_000, tuple(range(1, 11))
# Seconds after which a drive hangs; an unbroken one takes a tenth of it.
PATIENCE = 120
MUTATIONS = [*CORE_MUTATIONS, *CONSTRAINT_MUTATIONS, *LEASE_MUTATIONS, *LOGPROBS_MUTATIONS, *SESSION_MUTATIONS]


def _copy(root: Path) -> None:
    """The repository below `root`: links, but for the services, which are to be edited."""
    for name in ("libs", "tests"):
        (root / name).symlink_to(REPOSITORY / name)
    (root / "services").mkdir()
    for name in ("scheduler", "gateway"):
        shutil.copytree(REPOSITORY / "services" / name, root / "services" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "services" / "__init__.py", root / "services")


def verdict(mutation: Mutation) -> str:
    """What the drive said of the mutated code: the last line of its failure; "" when it noticed nothing. Raises as Mutation.apply."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _copy(root)
        mutation.apply(root)
        environment = {**os.environ, "PYTHONPATH": str(root)}
        for seed in SEEDS:
            command = [sys.executable, "-m", f"tests.property.{mutation.drive}", "--events", str(EVENTS), "--seed", str(seed)]
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
