"""Which backend serves a worker: the flag's word, and what each needs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.telemetry.logs import get_logger
from services.worker.constraints.base import Backend
from services.worker.constraints.prepared import Constraints, PreparedTable
from tokenloom.worker.v1 import worker_pb2

_log = get_logger(__name__)

# Module and class of each backend; a module is imported only where its backend is used, since its library is big or not installed.
_BACKENDS = {
    "llguidance": ("services.worker.constraints.guidance", "GuidanceBackend"),
    "xgrammar": ("services.worker.constraints.xgrammar_backend", "XgrammarBackend"),
}
# vLLM's names for the same.
_ALIASES = {"guidance": "llguidance", "auto": "llguidance"}


def backend_name(word: str) -> str:
    """The backend that a flag's word means; docs/decisions/0024 says why `auto` is llguidance."""
    return _ALIASES.get(word, word)


def load_backend(name: str, model: ModelDirectory) -> Backend:
    """A backend by its own name, with the model's vocabulary.

    Raises TokenloomError: INVALID_REQUEST when its library is not installed, UNSUPPORTED when it cannot read the model's tokenizer.
    """
    module, attribute = _BACKENDS[name]
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        text = (
            f"--structured-outputs-config.backend {name} needs {error.name}, which is not installed: "
            f"pip install 'tokenloom[{_EXTRAS[name]}]'"
        )
        raise TokenloomError(ErrorCode.INVALID_REQUEST, text) from error
    return cast(Backend, factory(model))


_EXTRAS = {"llguidance": "worker", "xgrammar": "xgrammar"}


def load_constraints(word: str, model: Path, facts: worker_pb2.WorkerFacts) -> Constraints | None:
    """The backend of a flag's word, told to the scheduler by `facts`; None: `auto`, and the model's tokenizer cannot be constrained.

    Raises TokenloomError as load_backend.
    """
    try:
        backend = load_backend(backend_name(word), ModelDirectory(model))
    except TokenloomError as error:
        if word != "auto" or error.code is not ErrorCode.UNSUPPORTED:
            raise
        _log.warning("constraints are refused here", reason=error.message)
        return None
    facts.constraint_backend = backend.name
    return Constraints(backend, PreparedTable(vocab_size=facts.vocab_size, endings=facts.eos_token_ids))
