"""A loaded model with its cache: one call computes and samples one step. Belongs to one thread, the runner's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from libs.blocks import BLOCK_SIZE
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from libs.models.directory import ModelDirectory
from libs.models.llama_config import LlamaConfig
from libs.sampling import SamplingParams
from libs.telemetry.logs import get_logger
from services.worker import facts, host, kv_cache, logprobs, numerics, weights
from services.worker.batch import Batch, Opening, Row
from services.worker.config import WorkerConfig
from services.worker.logprobs import Kept, Told
from services.worker.models.registry import Model, build
from services.worker.ops.base import HeadShape, Ops, Step
from services.worker.quantized_reader import HEAD, QuantizedReader, check_widths
from services.worker.sampling.custom import CustomProcessor, load_processors
from services.worker.sampling.picking import Picker, pick
from services.worker.sampling.sampler import Sampled, sample
from services.worker.slots import Limits, SlotTable, StagedRow
from services.worker.step_inputs import KeptSampling, build_inputs, build_mask
from tokenloom.worker.v1 import worker_pb2

_log = get_logger(__name__)


@dataclass(slots=True)
class Executed:
    """What a step computed: the token drawn by a row's index in the batch, the rows that have none and why, and microseconds.

    `logprobs`: of those tokens whose rows asked, by the same index; `told`: what rows tell of their prompts.
    """

    tokens: dict[int, int]
    non_finite: frozenset[int]
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    dead_ends: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    logprobs: Mapping[int, PackedLogprobs] = field(default_factory=dict)
    told: Sequence[Told] = ()


class Engine:
    """See the module. Everything that can be refused is refused while loading. `step` is the model, bound to its executor and cache."""

    def __init__(
        self, step: Step, facts: worker_pb2.WorkerFacts, processors: Sequence[CustomProcessor] = (), picker: Picker = pick
    ) -> None:
        """`processors`: the operator's logits processors, for the slots whose rows this engine samples; `picker`: the executor's."""
        self.step = step
        self._picker = picker
        self._sampling = KeptSampling()
        self.processors = processors
        self.facts = facts
        self.limits = Limits(
            num_slots=facts.num_slots,
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            max_tokens_per_step=facts.max_tokens_per_step,
            vocab_size=facts.logits_width,
            max_logprobs=facts.max_logprobs,
        )

    def settle(self) -> None:
        """The calling thread executes all steps from now on; see Step."""
        self.step.settle()

    def warm_up(self) -> None:
        """Computes one token in block 0, so that libraries are loaded and buffers made before the first request.

        Raises TokenloomError(INVALID_REQUEST) when its logits are not finite: every request would fail.
        """
        ids, none = np.zeros(1, np.int32), np.empty(0, np.int32)
        opening = Opening(0, "warm-up", ids, none, 0, ids, SamplingParams(max_tokens=1), None, 0)
        batch = Batch(0, 0, 0, 1, (), (opening,), (Row(0, 1, True, none),))
        if self.execute(SlotTable(self.limits, ()).stage(batch).rows).non_finite:
            text = f"the logits of its first token are not finite: its weights hold NaN or infinity, or overflow in {self.facts.kv_dtype}"
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"the model cannot be served: {text}")

    @torch.inference_mode()
    def execute(self, rows: Sequence[StagedRow]) -> Executed:
        """Computes the rows' tokens into the cache and samples those that ask for it. `rows` may be empty."""
        if not rows:
            return Executed({}, frozenset())
        vocabulary = self.facts.vocab_size
        began = time.perf_counter_ns()
        inputs, sampling = build_inputs(rows), self._sampling.build(rows, vocabulary)
        mask = build_mask(rows, vocabulary)
        prepared = time.perf_counter_ns()
        logits = self.step(inputs)
        computed = time.perf_counter_ns()
        kept = logprobs.keep(logits, rows, vocabulary)
        sampled = sample(logits, sampling, vocabulary, mask, self._picker)
        told = logprobs.of_prompts(self.step, rows, vocabulary)
        executed = _executed([row.index for row in rows if row.sample], sampled, kept, told)
        ended = time.perf_counter_ns()
        executed.prepare_us, executed.forward_us = (prepared - began) // 1000, (computed - prepared) // 1000
        executed.sample_us = (ended - computed) // 1000
        return executed


def _executed(indices: Sequence[int], sampled: Sampled, kept: Kept | None, told: Sequence[Told]) -> Executed:
    """What the rows `indices` of the batch drew. Almost always all of them did."""
    drawn = sampled.finite & ~(sampled.dead | sampled.failed)
    tokens = dict(zip(indices, sampled.tokens.tolist(), strict=True))
    of_tokens = logprobs.of_tokens(kept, sampled.tokens) if kept is not None else ()
    listed = {indices[place]: packed for place, packed in of_tokens if drawn[place]}
    if drawn.all():
        return Executed(tokens, frozenset(), logprobs=listed, told=told)

    def those(where: npt.NDArray[np.bool_]) -> frozenset[int]:
        return frozenset(indices[place] for place in np.flatnonzero(where).tolist())

    lost = those(~drawn)
    return Executed(
        tokens={index: token for index, token in tokens.items() if index not in lost},
        non_finite=those(~sampled.finite),
        dead_ends=those(sampled.dead),
        failed=those(sampled.failed),
        logprobs=listed,
        told=told,
    )


@torch.inference_mode()
def load(config: WorkerConfig) -> Engine:
    """Loads the model of `config.model`, sizes its cache and computes one small step.

    Raises TokenloomError for whatever this worker cannot serve, with a sentence that says what to change.
    """
    directory = ModelDirectory(config.model, config.chat_template)
    model_config, dtype = directory.config, numerics.choose_dtype(config.dtype)
    threads = numerics.use_threads(config.threads)
    ops, executor = numerics.choose_ops(config, head_shape(model_config), dtype)
    started = time.monotonic()
    size = _cache_size(config, model_config, dtype, packed=executor != "reference")
    offered = _facts(config, directory, size, dtype, executor)
    processors = load_processors(config.logits_processors, offered.vocab_size, torch.device("cpu"))
    offered.logits_processors.extend(item.name for item in processors)
    model, file_bytes = _built(config, directory, ops, size.max_model_len, dtype)
    host.return_freed_memory()
    cache = kv_cache.allocate(model_config, size.num_blocks, dtype)
    engine = Engine(ops.bind(model.forward, cache, offered.max_tokens_per_step), offered, processors, ops.picker())
    numerics.leave_cores_to_the_team(ops)
    engine.warm_up()
    _log.info(
        "model loaded",
        seconds=round(time.monotonic() - started, 2),
        file_mib=file_bytes >> 20,
        threads=threads,
        numerics=engine.facts.fingerprints.numerics,
        kv_blocks=size.num_blocks,
        kv_tokens=size.num_blocks * BLOCK_SIZE,
        max_model_len=size.max_model_len,
    )
    return engine


def _built(config: WorkerConfig, directory: ModelDirectory, ops: Ops, max_positions: int, dtype: torch.dtype) -> tuple[Model, int]:
    """The model with its weights, in integers where the configuration says so, and the files' bytes. The files are let go."""
    model = directory.config
    source = weights.open_source(directory.weight_files(), model)
    floats, tied = weights.reader(source, dtype, expected=9 * model.num_hidden_layers + 3), model.tie_word_embeddings
    try:
        if config.quantization is None:  # a tied head in the file is not served: it need not be readable either
            built = build(model, lambda name: None if tied and name == HEAD else floats(name), ops, max_positions)
        else:
            check_widths(model, config.quantization)
            integers = QuantizedReader(source, floats, config.quantization, tied_head=tied)
            built = build(model, integers, ops, max_positions)
            integers.log()
    except (KeyError, ValueError) as error:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{directory.path}: {error.args[0]}") from error
    weights.warn_of_unused(source)
    return built, source.total_bytes


def head_shape(config: LlamaConfig) -> HeadShape:
    """Attention heads of every layer."""
    return HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def weight_bytes(config: LlamaConfig, dtype: torch.dtype, quantization: str | None = None, *, packed: bool = True) -> int:
    """Bytes of the loaded weights.

    `packed`: the executor keeps products' weights in panels, as the C++ kernels do: a tied head beside the embedding, and integers as such,
    of which four bits take five with the scale and the minimum of their group. Otherwise as tensors of floats, those that integers stand
    for included; a tied head is then the embedding itself, unless it was quantised.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention = 2 * hidden * dim * (config.num_attention_heads + config.num_key_value_heads)
    products, table = config.num_hidden_layers * (attention + 3 * hidden * inner), config.vocab_size * hidden
    if quantization is None:
        return (products + table * (1 if config.tie_word_embeddings and not packed else 2)) * dtype.itemsize
    if not packed:
        return (products + 2 * table) * dtype.itemsize
    return table * dtype.itemsize + table + (products if quantization == "int8" else products * 5 // 8)


def _cache_size(config: WorkerConfig, model: LlamaConfig, dtype: torch.dtype, *, packed: bool) -> kv_cache.CacheSize:
    bytes_per_block = kv_cache.block_bytes(model, dtype)
    budget = kv_cache.budget_bytes(
        wanted=config.kv_cache_memory_bytes,
        utilization=config.gpu_memory_utilization,
        memory=host.machine_memory(),
        weights=weight_bytes(model, dtype, config.quantization, packed=packed),
    )
    size = kv_cache.size_cache(
        budget=budget, bytes_per_block=bytes_per_block, wanted_len=config.max_model_len, model_len=model.max_position_embeddings
    )
    if size.max_model_len < (config.max_model_len or model.max_position_embeddings):
        _log.warning(
            "max_model_len is lowered to what the KV cache holds",
            model=model.max_position_embeddings,
            lowered_to=size.max_model_len,
            kv_cache_bytes=budget,
        )
    return size


def _facts(
    config: WorkerConfig, directory: ModelDirectory, size: kv_cache.CacheSize, dtype: torch.dtype, executor: str
) -> worker_pb2.WorkerFacts:
    model, known = directory.config, facts.tokenizer_size(directory)
    if known > model.vocab_size:
        _log.warning("the tokenizer knows more ids than the model has rows; the others cannot occur", ids=known, rows=model.vocab_size)
    ids = min(known, model.vocab_size)
    unbuilt = directory.generation_defaults.unbuilt
    if unbuilt:
        _log.warning("generation_config.json sets fields that have no effect here", fields=list(unbuilt))
    identity = numerics.identity(executor, dtype, config.quantization, batch_invariant=config.batch_invariant)
    return worker_pb2.WorkerFacts(
        fingerprints=facts.fingerprints(directory, identity),
        block_size=BLOCK_SIZE,
        num_blocks=size.num_blocks,
        kv_dtype=str(dtype).removeprefix("torch."),
        max_model_len=size.max_model_len,
        eos_token_ids=directory.eos_token_ids,
        vocab_size=ids,
        logits_width=model.vocab_size,
        defaults=facts.defaults_message(directory.generation_defaults),
        max_in_flight=MAX_IN_FLIGHT,
        feed_forward_distance=1,
        num_slots=config.max_num_seqs,
        max_tokens_per_step=max(config.max_num_batched_tokens, size.max_model_len),
        max_logprobs=ids if config.max_logprobs < 0 else min(config.max_logprobs, ids),
        block_bytes=kv_cache.block_bytes(model, dtype),
        device="cpu",
    )


# One batch runs, one waits: enough to never be idle between steps, and no more for an arrival to wait behind.
MAX_IN_FLIGHT = 2
