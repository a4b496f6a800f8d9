"""The paged KV cache: fixed blocks of 16 tokens, and how many of them the memory holds.

    layer   keys, values   [blocks, KV heads, 16, head size]
    token   t of a sequence lies in block table[t // 16], at offset t % 16

A block's tokens of one head lie together, so that attention reads them as one run. In memory the keys' last two dimensions are swapped
(tokens side by side), which makes scores of 16 tokens one vector; the tensor is a transposed view and hides it.

All layers' parts of a block lie side by side, in huge pages where the system has them: attention meets a page of 4 KiB, and a walk through
the page tables, for every head of every block. Laid out by layers, one block in use would hold a huge page of each; so it holds its own
size, rounded up to 2 MiB. Pages are taken from the operating system only when first written, and nothing is read that was not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.blocks import BLOCK_SIZE, blocks_for
from libs.errors import ErrorCode, TokenloomError
from libs.models.llama_config import LlamaConfig
from services.worker.ops.base import LayerCache
from services.worker.ops.weight_memory import huge_area

GIB = 1024**3
_DEFAULT_BYTES = 4 * GIB


def block_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BLOCK_SIZE * dtype.itemsize


def allocate(config: LlamaConfig, num_blocks: int, dtype: torch.dtype) -> list[LayerCache]:
    """The cache of every layer. Raises TokenloomError(CANNOT_FIT) when the memory is not to be had."""
    heads, dim, size = config.num_key_value_heads, config.head_dim, num_blocks * block_bytes(config, dtype)
    try:
        area = huge_area(size)[:size].view(dtype)
    except (MemoryError, RuntimeError) as error:
        raise TokenloomError(ErrorCode.CANNOT_FIT, f"no memory for a KV cache of {size / GIB:.2f} GiB: {error}") from error
    parts = area.view(num_blocks, config.num_hidden_layers, 2, heads * dim * BLOCK_SIZE)
    return [
        LayerCache(
            keys=parts[:, layer, 0].view(num_blocks, heads, dim, BLOCK_SIZE).transpose(2, 3),
            values=parts[:, layer, 1].view(num_blocks, heads, BLOCK_SIZE, dim),
        )
        for layer in range(config.num_hidden_layers)
    ]


def budget_bytes(*, wanted: int | None, utilization: float | None, memory: int, weights: int) -> int:
    """Bytes for the cache: `wanted`, or a share of `memory` less the weights, or the default (4 GiB, or a quarter of the memory if less).

    Raises TokenloomError(CANNOT_FIT) when the weights leave nothing of the share.
    """
    if wanted is not None:
        return wanted
    if utilization is None:
        return min(_DEFAULT_BYTES, memory // 4)
    left = int(memory * utilization) - weights
    if left <= 0:
        raise TokenloomError(
            ErrorCode.CANNOT_FIT,
            f"--gpu-memory-utilization {utilization} of {memory / GIB:.2f} GiB is less than the weights' {weights / GIB:.2f} GiB",
        )
    return left


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of the cache, and the longest sequence in tokens, which is lower than the model's where the cache cannot hold more."""

    num_blocks: int
    max_model_len: int


def size_cache(*, budget: int, bytes_per_block: int, wanted_len: int | None, model_len: int) -> CacheSize:
    """Fits blocks into `budget` bytes. Raises TokenloomError(CANNOT_FIT) when they cannot hold one sequence of the length asked for,
    or not even one block, and (INVALID_REQUEST) when the length asked for is beyond the model's.
    """
    if wanted_len is not None and wanted_len > model_len:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--max-model-len {wanted_len} exceeds the model's {model_len} positions")
    num_blocks = budget // bytes_per_block
    longest = wanted_len or model_len
    if wanted_len is not None and num_blocks < blocks_for(wanted_len):
        need = blocks_for(wanted_len) * bytes_per_block
        raise TokenloomError(
            ErrorCode.CANNOT_FIT,
            f"a KV cache of {budget / GIB:.3f} GiB holds {num_blocks * BLOCK_SIZE} tokens, --max-model-len asks for {wanted_len}: "
            f"raise --kv-cache-memory-bytes to at least {need} or lower --max-model-len",
        )
    if num_blocks < 1:
        raise TokenloomError(ErrorCode.CANNOT_FIT, f"a KV cache of {budget} bytes holds no block of {bytes_per_block} bytes")
    return CacheSize(num_blocks, min(longest, num_blocks * BLOCK_SIZE))
