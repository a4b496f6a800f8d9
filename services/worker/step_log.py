"""A file of the steps that a worker ran: batches as they came and answers as they went, for `bench.mesh_cost` to run again.

Each entry: the step's beginning (monotonic nanoseconds), the lengths of batch and answer, and both messages. A lease's batch stands with
its first step; with the later ones it is empty.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from libs.errors import ErrorCode, TokenloomError
from tokenloom.worker.v1 import worker_pb2

_HEAD = struct.Struct("<QII")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step: when it began (monotonic ns), its batch (None: a later one of the lease before) and its answer."""

    began_ns: int
    batch: worker_pb2.StepBatch | None
    result: worker_pb2.StepResult


class StepLog:
    """The file, open for appending. For one thread, and one process: entries of two would lie among each other."""

    def __init__(self, path: Path) -> None:
        """Raises TokenloomError(INVALID_REQUEST) when the file cannot be written, or another worker writes to it."""
        try:
            self._file = path.open("ab", buffering=0)
            if path.is_file():
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--record-steps {path}: another worker writes to it") from error
        except OSError as error:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--record-steps {path}: {error.strerror}") from error

    def write(self, step: LoggedStep) -> None:
        """Appends a step. Raises OSError, of a full disk for one; what was written of the step is then taken back."""
        batch = step.batch.SerializeToString() if step.batch is not None else b""
        result = step.result.SerializeToString()
        entry = _HEAD.pack(step.began_ns, len(batch), len(result)) + batch + result
        written = self._file.write(entry)
        if written < len(entry):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, f"{written} of {len(entry)} bytes were written")

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def read_steps(path: Path, offset: int = 0) -> Iterator[LoggedStep]:
    """The steps in a file from byte `offset` on. One that is not whole yet ends it."""
    data = path.read_bytes()[offset:]
    at = 0
    while at + _HEAD.size <= len(data):
        began, of_batch, of_result = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + of_batch + of_result > len(data):
            return
        batch = worker_pb2.StepBatch.FromString(data[at : at + of_batch]) if of_batch else None
        yield LoggedStep(began, batch, worker_pb2.StepResult.FromString(data[at + of_batch : at + of_batch + of_result]))
        at += of_batch + of_result
