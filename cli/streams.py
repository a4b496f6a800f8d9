"""stdin, stdout and stderr of a command that is a client: no byte of a user or a model, and no reader that leaves, is a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys

# Exit codes of what Ctrl-C ended, and of what lost its reader (SIGPIPE), as shells have them.
INTERRUPTED, READER_GONE = 130, 141


def forgive() -> None:
    """What is no text on stdin, and what stdout's encoding has no letters for, is replaced from now on; a closed one is an empty one."""
    sys.stdin = sys.stdin or io.StringIO()
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def leave_quietly() -> int:
    """The exit code after a BrokenPipeError of stdout; what it still buffers goes nowhere, or its flush at the end would complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return READER_GONE
