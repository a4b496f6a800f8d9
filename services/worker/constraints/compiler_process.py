"""The compiler's process: `python -m services.worker.constraints.compiler_process MODEL_DIR BACKEND MEMORY_BYTES`.

Questions are serialised common.v1.Constraint messages, answers what the backend's `load` makes a grammar of (libs/helper_frames.py).
"""

from __future__ import annotations

import sys

from libs.constraints import Constraint, ConstraintKind
from libs.helper_frames import Answerer, limit_memory, serve_frames
from libs.models.directory import ModelDirectory
from services.worker.constraints.base import Backend, refused
from services.worker.constraints.probe import probe
from services.worker.constraints.registry import load_backend
from tokenloom.common.v1 import common_pb2

# Compiled once before the first question, so that no client's constraint pays for what the library does on first use.
_WARM_UP = common_pb2.Constraint(json_object=True)


# A choice is one lexeme without repetitions: up to so many characters its masks have nothing to show on a walk.
_PLAIN_CHOICE = 20_000


def compile_one(backend: Backend, payload: bytes) -> bytes:
    """The answer to one question. Raises TokenloomError(INVALID_CONSTRAINT)."""
    try:
        return _compile(backend, Constraint.from_proto(common_pb2.Constraint.FromString(payload)))
    except RecursionError as error:
        raise refused("the constraint is nested too deeply") from error
    except Exception as error:
        # Libraries in C++ have a name of their own for it, which comes as whatever their binding makes of it.
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            raise refused("compiling the constraint took too much memory") from error
        raise


def _compile(backend: Backend, constraint: Constraint) -> bytes:
    compiled = backend.compile(constraint)
    if constraint.kind is not ConstraintKind.CHOICE or sum(map(len, constraint.texts)) > _PLAIN_CHOICE:
        probe(backend.load(compiled), backend.vocab_size, backend.endings)
    return compiled


def main() -> int:
    """Serves questions until stdin closes."""

    def load() -> Answerer:
        backend = load_backend(sys.argv[2], ModelDirectory(sys.argv[1]))
        compile_one(backend, _WARM_UP.SerializeToString())
        limit_memory(int(sys.argv[3]))
        return lambda payload: compile_one(backend, payload)

    return serve_frames(load)


if __name__ == "__main__":
    sys.exit(main())
