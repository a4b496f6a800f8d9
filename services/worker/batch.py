"""A StepBatch as the runner uses it: typed, unpacked, and refused here if it asks for what this worker cannot do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from libs.telemetry.tracing import TraceParent
from tokenloom.worker.v1 import worker_pb2

Ids = npt.NDArray[np.int32]

# Most steps of one lease. Each of them is answered, even when none runs.
MAX_LEASE_STEPS = 1024
_NUMBERS = 2**64

_NO_IDS: Ids = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence that enters a slot; see worker.v1.Open. `trace` names the scheduler's prefill span; None: not traced.

    `constraint_id`: a prepared constraint of the batch's epoch; 0: none.
    """

    slot: int
    request: str
    prompt_ids: Ids
    output_ids: Ids
    computed_tokens: int
    block_ids: Ids
    sampling: SamplingParams
    trace: TraceParent | None = None
    decode_span_id: int = 0
    request_span_id: int = 0
    constraint_id: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one slot to compute: `count` from where the slot ends, in its blocks and `new_blocks`; `sample`: draw after the last."""

    slot: int
    count: int
    sample: bool
    new_blocks: Ids


@dataclass(frozen=True, slots=True)
class Batch:
    """Work for `lease_steps` (at least 1) consecutive steps; see worker.v1.StepBatch."""

    epoch: int
    number: int
    predecessor: int
    lease_steps: int
    closes: tuple[int, ...]
    opens: tuple[Opening, ...]
    rows: tuple[Row, ...]

    def later_step(self, index: int) -> Batch:
        """What step `index` (from 1) of the lease does: the same rows again, and nothing that only the first one does."""
        rows = tuple(replace(row, new_blocks=_NO_IDS) if row.new_blocks.size else row for row in self.rows)
        return replace(self, number=self.number + index, lease_steps=1, closes=(), opens=(), rows=rows)


def granted_steps(message: worker_pb2.StepBatch) -> int:
    """Steps that are to be answered: those of the lease, or 1 for a lease so long that parse_batch refuses it."""
    steps: int = message.lease_steps or 1
    return steps if steps <= min(MAX_LEASE_STEPS, _NUMBERS - message.number) else 1


def parse_batch(message: worker_pb2.StepBatch) -> Batch:
    """Reads a batch.

    Raises TokenloomError: UNSUPPORTED for features that this worker does not have (drafts, offsets, adapters),
    PROTOCOL_VIOLATION when the message contradicts itself.
    """
    if any(message.draft_counts):
        raise TokenloomError(ErrorCode.UNSUPPORTED, "this worker verifies no draft tokens")
    if any(message.offsets):
        raise TokenloomError(ErrorCode.UNSUPPORTED, "this worker computes rows only from where their slot ends: offsets must be 0")
    lease_steps = granted_steps(message)
    if lease_steps < message.lease_steps:
        raise _violation(f"a lease of {message.lease_steps} steps from {message.number}; at most {MAX_LEASE_STEPS}, of numbers below 2**64")
    rows = _rows(message)
    if lease_steps > 1 and not all(row.sample and row.count == 1 for row in rows):
        raise _violation("a lease of several steps takes rows of one sampled token only")
    return Batch(
        epoch=message.epoch,
        number=message.number,
        predecessor=message.predecessor,
        lease_steps=lease_steps,
        closes=tuple(message.closes),
        opens=tuple(_opening(item) for item in message.opens),
        rows=rows,
    )


def _rows(message: worker_pb2.StepBatch) -> tuple[Row, ...]:
    count = len(message.slots)
    parallel = {"counts": len(message.counts), "samples": len(message.samples), "new_block_counts": len(message.new_block_counts)}
    if any(length != count for length in parallel.values()):
        raise _violation(f"{count} slots, but {parallel}")
    if len(set(message.slots)) != count:
        raise _violation("a slot stands in two rows")
    if 0 in message.counts:
        raise _violation("a row of no tokens")
    pieces = _block_pieces(message)
    return tuple(
        Row(slot, tokens, bool(sample), piece)
        for slot, tokens, sample, piece in zip(message.slots, message.counts, message.samples, pieces, strict=True)
    )


def _block_pieces(message: worker_pb2.StepBatch) -> Sequence[Ids]:
    """Each row's new blocks. Most steps bring none: then nothing is cut up."""
    blocks, count = _ids(message.new_block_ids, "new_block_ids"), len(message.slots)
    told = sum(message.new_block_counts)
    if told != blocks.size:
        raise _violation(f"new_block_counts sum to {told}, new_block_ids holds {blocks.size}")
    if not told:
        return (_NO_IDS,) * count
    return np.split(blocks, np.cumsum(np.asarray(message.new_block_counts, np.int64))[:-1])


def _opening(message: worker_pb2.Open) -> Opening:
    if message.adapter_slot:
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"this worker has no adapters ({message.request} asks for slot {message.adapter_slot})")
    prompt, output = _ids(message.prompt_ids, "prompt_ids"), _ids(message.output_ids, "output_ids")
    if not prompt.size:
        raise _violation(f"{message.request} opens with an empty prompt")
    if message.computed_tokens >= prompt.size + output.size:
        raise _violation(f"{message.request} opens with {message.computed_tokens} computed of {prompt.size + output.size} tokens")
    params = _sampling(message)
    return Opening(
        slot=message.slot,
        request=message.request,
        prompt_ids=prompt,
        output_ids=output,
        computed_tokens=message.computed_tokens,
        block_ids=_ids(message.block_ids, "block_ids"),
        sampling=params,
        trace=TraceParent.parse(message.trace.traceparent, message.trace.tracestate) if message.trace.traceparent else None,
        decode_span_id=message.decode_span_id,
        request_span_id=message.request_span_id,
        constraint_id=message.constraint_id,
    )


def _sampling(message: worker_pb2.Open) -> SamplingParams:
    try:
        params = SamplingParams.from_proto(message.sampling)
        extra_args = json.loads(params.extra_args_json or b"{}")
    except (ValueError, RecursionError) as error:
        raise _violation(f"{message.request} has sampling parameters of no sense: {error}") from error
    if not (0 <= params.temperature < math.inf and 0 <= params.top_p <= 1 and 0 <= params.min_p <= 1):
        raise _violation(f"{message.request} has temperature {params.temperature}, top_p {params.top_p}, min_p {params.min_p}")
    added = (params.presence_penalty, params.frequency_penalty, *(value for _, value in params.logit_bias))
    if not (0 < params.repetition_penalty < math.inf and all(map(math.isfinite, added))):
        raise _violation(f"{message.request} has penalties or biases that are not finite, or a repetition_penalty not above 0")
    if len({token for token, _ in params.logit_bias}) < len(params.logit_bias):
        raise _violation(f"{message.request} has two biases for one id")
    if not isinstance(extra_args, dict):
        raise _violation(f"{message.request} has extra arguments that are no JSON object")
    if not all(params.bad_words):
        raise _violation(f"{message.request} has an empty bad word")
    return params


def _ids(data: bytes, name: str) -> Ids:
    if len(data) % 4:
        raise _violation(f"{name} holds {len(data)} bytes, no multiple of 4")
    ids = np.frombuffer(data, "<u4")
    if ids.size and int(ids.max()) > np.iinfo(np.int32).max:
        raise _violation(f"{name} holds an id of 2**31 or more")
    return ids.astype(np.int32)


def _violation(message: str) -> TokenloomError:
    return TokenloomError(ErrorCode.PROTOCOL_VIOLATION, message)
