"""`tokenloom model import`: the init step of a mesh in containers. Needs no torch; says on one line each what it does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from libs.errors import ErrorCode, TokenloomError
from libs.models.served import import_model


def main(model: str, *, to: Path, models: Path | None) -> int:
    """Imports `model` into `to`. 0: it is there; 1: it could not be had now; 2: it cannot be served, or the call is wrong."""
    started = time.monotonic()
    try:
        done = import_model(model, to, models, _say)
    except TokenloomError as error:
        print(f"tokenloom model import: error: {error.message}", file=sys.stderr)
        return 1 if error.code is ErrorCode.UNAVAILABLE else 2
    except PermissionError as error:
        # The usual case: safetensors are saved for their owner alone, and a container's user is another.
        print(f"tokenloom model import: error: {error}; user {os.getuid()} must be able to read it: chmod -R a+rX", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tokenloom model import: error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in done.path.iterdir()) >> 20
    what = "imported into" if done.new else "is already at"
    _say(f"{done.origin.model} {what} {to}: {size} MiB, {time.monotonic() - started:.1f} s")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
