"""The operator's own logits processors: found at the start, asked once per request, called once per sampled token.

docs/logits-processors.md says what an operator writes. Three things that they give back, each from the one before:

    factory(vocab_size=..., device=...)        once, at the start     what `--logits-processors` and the entry points name
    processor(params, extra_args)              once per opening       None: it has nothing to do with this request
    process(prompt_ids, output_ids, logits)    once per sampled token changes float32[V] in place
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from libs.telemetry.logs import get_logger
from services.worker.sampling.mask import FORBIDDEN
from services.worker.sampling.rows import CustomRow, RowProcessor

_log = get_logger(__name__)

# Packages declare their processors in this group: name = "module:factory".
ENTRY_POINTS = "tokenloom.logits_processors"

Processor = Callable[[SamplingParams, Mapping[str, Any]], RowProcessor | None]


@dataclass(frozen=True, slots=True)
class CustomProcessor:
    """A processor that is there. `name` tells it from all others: the entry point's and its package's version, or `module:factory`."""

    name: str
    processor: Processor


@dataclass(frozen=True, slots=True)
class Joined:
    """A processor that takes part in a request, or the exception with which it was to begin."""

    name: str
    process: RowProcessor | Exception


def load_processors(flags: Sequence[str], vocab_size: int, device: torch.device) -> tuple[CustomProcessor, ...]:
    """All processors in the order in which they run: entry points by name, then `flags` ("module:factory") as they are given.

    `vocab_size`: length of the logits that they are going to be given, on `device`.

    Raises TokenloomError(INVALID_REQUEST) for one that cannot be imported or made, and for two of one name.
    """
    found = [(_versioned(point), point) for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value))]
    found += [(flag, EntryPoint(name=flag, value=flag, group=ENTRY_POINTS)) for flag in flags]
    names = [point.name for _, point in found]
    for name in names:
        if names.count(name) > 1:
            values = ", ".join(point.value for _, point in found if point.name == name)
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"two logits processors are called {name} ({values})")
    return tuple(CustomProcessor(name, _make(point, vocab_size, device)) for name, point in found)


def join_request(processors: Sequence[CustomProcessor], sampling: SamplingParams) -> tuple[Joined, ...]:
    """Those that take part in a request. One that raises is kept with its exception: it fails the request where it would have sampled."""
    if not processors:
        return ()
    extra_args = json.loads(sampling.extra_args_json or b"{}")
    joined = []
    for item in processors:
        try:
            process = item.processor(sampling, extra_args)
            if process is not None:
                joined.append(Joined(item.name, process))
        except Exception as error:
            joined.append(Joined(item.name, error))
    return tuple(joined)


def run_custom(row: CustomRow, logits: torch.Tensor) -> bool:
    """Lets an operator's processor change its row's `logits` (float32[V]); False: it failed, and the log says how."""
    try:
        if isinstance(row.process, Exception):
            raise row.process
        returned: object = row.process(row.prompt_ids, row.output_ids, logits)
        if returned is not None:
            raise TypeError("it returned a value; logits are changed in place")
        if torch.isnan(logits).any() or (logits == -FORBIDDEN).any():
            raise ValueError("it left logits that are no numbers or infinite")
    except Exception:
        _log.exception("logits processor failed; its request fails", processor=row.name, request=row.request)
        return False
    return True


def _versioned(point: EntryPoint) -> str:
    return f"{point.name} ({point.dist.name} {point.dist.version})" if point.dist is not None else point.name


def _make(point: EntryPoint, vocab_size: int, device: torch.device) -> Processor:
    try:
        processor: Any = point.load()(vocab_size=vocab_size, device=device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"logits processor {point.name} ({point.value}): {reason}") from error
    if not callable(processor):
        returned = type(processor).__name__
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"logits processor {point.name} ({point.value}): it gave a {returned}, no callable")
    made: Processor = processor
    return made
