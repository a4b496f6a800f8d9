"""What the attached workers' facts mean for the mesh: whether a worker fits, the limits of a step, what gateways are told."""

from __future__ import annotations

from libs.blocks import BLOCK_SIZE
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import ENTRY_BYTES
from libs.rpc import PROTOCOL_VERSION
from libs.telemetry.logs import get_logger
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.state import Limits
from services.scheduler.windows import Share
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

# Bytes that the log-probabilities of all tokens drawn in a step may take, and again those of all prompt positions: both together, and what
# else stands in a worker's answer, fit into a message of 64 MiB.
_LOGPROBS_BYTES = 24 * 1024 * 1024
# Without any of these a worker attaches and nobody it is given ever runs.
_NEEDED = ("num_blocks", "num_slots", "max_tokens_per_step", "max_model_len", "vocab_size")

log = get_logger(__name__)


def check_fit(
    worker: str, facts: worker_pb2.WorkerFacts, mesh: worker_pb2.WorkerFacts, tokenizer: str, config: SchedulerConfig, *, alone: bool
) -> None:
    """Raises TokenloomError naming the worker and both values when it differs from the mesh (the first worker's facts, the tokenizer's
    fingerprint) or cannot hold a sequence. A worker that is `alone` decides how long sequences and how large steps may be."""
    for what, ours, theirs in (
        ("tokenizer fingerprint", tokenizer, facts.fingerprints.tokenizer),
        ("model fingerprint", mesh.fingerprints.model, facts.fingerprints.model),
        ("numerics", mesh.fingerprints.numerics, facts.fingerprints.numerics),
        ("KV dtype", mesh.kv_dtype, facts.kv_dtype),
        ("block size", BLOCK_SIZE, facts.block_size),
        ("constraint backend", mesh.constraint_backend, facts.constraint_backend),
        ("logits processors", list(mesh.logits_processors), list(facts.logits_processors)),
    ):
        if ours != theirs:
            raise TokenloomError(ErrorCode.FINGERPRINT_MISMATCH, f"worker {worker}: its {what} is {theirs}, the mesh has {ours}")
    for name in _NEEDED:
        if not getattr(facts, name):
            raise TokenloomError(ErrorCode.CANNOT_FIT, f"worker {worker}: its {name} is 0: it could run nothing")
    shape = facts if alone else mesh
    length = shape.max_model_len
    if facts.max_model_len < length:  # one that could hold longer sequences than the mesh's is welcome
        served = facts.max_model_len
        raise TokenloomError(ErrorCode.FINGERPRINT_MISMATCH, f"worker {worker}: its max_model_len is {served}, the mesh has {length}")
    if facts.max_logprobs < shape.max_logprobs:
        listed = facts.max_logprobs
        raise TokenloomError(ErrorCode.CANNOT_FIT, f"worker {worker}: its --max-logprobs is {listed}, the mesh has {shape.max_logprobs}")
    budget = min(config.max_num_batched_tokens, shape.max_tokens_per_step)
    if facts.max_tokens_per_step < budget:
        held = facts.max_tokens_per_step
        raise TokenloomError(ErrorCode.CANNOT_FIT, f"worker {worker}: its steps hold {held} tokens, the mesh's have up to {budget}")
    if facts.num_blocks * BLOCK_SIZE < length:
        raise TokenloomError(ErrorCode.CANNOT_FIT, f"worker {worker}: {facts.num_blocks} blocks cannot hold a sequence of {length} tokens")
    if not config.enable_chunked_prefill and facts.max_tokens_per_step < length:
        held = facts.max_tokens_per_step
        raise TokenloomError(
            ErrorCode.CANNOT_FIT, f"worker {worker}: its steps hold {held} tokens; without chunked prefill {length} are needed"
        )


def fits_anew(worker: str, facts: worker_pb2.WorkerFacts, config: SchedulerConfig) -> bool:
    """Whether a scheduler that starts now, with this worker's tokenizer, would take it as its first."""
    try:
        check_fit(worker, facts, facts, facts.fingerprints.tokenizer, config, alone=True)
    except TokenloomError:
        return False
    return True


def most_logprobs(config: SchedulerConfig, facts: worker_pb2.WorkerFacts) -> tuple[int, int]:
    """Alternatives that a request may ask for, of its output's tokens and of its prompt's: what workers list, and what one answer of theirs
    holds when everybody in a step asks for them."""
    listed, entries = min(facts.max_logprobs, facts.vocab_size), _LOGPROBS_BYTES // ENTRY_BYTES
    rows, tokens = min(config.max_num_seqs, facts.num_slots), _token_budget(config, facts)
    return min(listed, max(0, entries // rows - 1)), min(listed, max(0, entries // tokens - 1))


def _token_budget(config: SchedulerConfig, facts: worker_pb2.WorkerFacts) -> int:
    budget = min(config.max_num_batched_tokens, facts.max_tokens_per_step)
    return budget if config.enable_chunked_prefill else max(budget, facts.max_model_len)


# Once prompts take this part of a step's budget, no further one begins in it (decision 34).
_PROMPTS_SHARE = 0.4


def limits_of(config: SchedulerConfig, facts: worker_pb2.WorkerFacts) -> Limits:
    """The limits of steps and queue. Without chunked prefill the token budget is at least the context length, and the log says so."""
    budget = _token_budget(config, facts)
    if budget > min(config.max_num_batched_tokens, facts.max_tokens_per_step):
        log.warning("token budget raised to the context length because chunked prefill is off", max_num_batched_tokens=budget)
    return Limits(
        max_tokens_per_step=budget,
        max_sequences=min(config.max_num_seqs, facts.num_slots),
        max_requests=config.max_queue,
        max_live_tokens=config.max_queue_tokens,
        max_model_len=facts.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        enough_prefill=max(1, int(budget * _PROMPTS_SHARE)),
    )


def model_facts(facts: worker_pb2.WorkerFacts, config: SchedulerConfig) -> scheduler_pb2.ModelFacts:
    """What a gateway must know of the model, of the queue's order and of how much may be live at all."""
    return scheduler_pb2.ModelFacts(
        fingerprints=facts.fingerprints,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        defaults=facts.defaults,
        priority_scheduling=config.scheduling_policy == "priority",
        max_live_sequences=config.max_queue,
        max_logprobs=most_logprobs(config, facts)[0],
        constraint_backend=facts.constraint_backend,
        logits_processors=facts.logits_processors,
        max_live_tokens=config.max_queue_tokens,
    )


def welcome_of(facts: worker_pb2.WorkerFacts | None, leader_token: int, config: SchedulerConfig) -> scheduler_pb2.Welcome:
    """What a session is told first, and again once a worker (whose `facts` are None until then) has attached."""
    model = model_facts(facts, config) if facts else None
    return scheduler_pb2.Welcome(protocol_version=PROTOCOL_VERSION, leader_token=leader_token, shard=config.shard, model=model)


def window_of(share: Share, max_model_len: int, not_ready: str) -> scheduler_pb2.Window:
    """A session's share as it travels; where tokens are not bounded, as many as its sequences can have. `not_ready`: why; empty: ready."""
    tokens = share.tokens or share.sequences * max_model_len
    return scheduler_pb2.Window(
        max_outstanding=share.sequences, max_outstanding_tokens=tokens, ready=not not_ready, not_ready_reason=not_ready
    )
