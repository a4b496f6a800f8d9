"""The names of a request's full blocks: what the prefix cache finds them by."""

from __future__ import annotations

from collections.abc import Sequence

from libs.blocks import BLOCK_SIZE, chain_hash
from services.scheduler.core.request import Request, RequestKey

_KEY_BYTES = 8


def extend_names(request: Request) -> None:
    """Names the blocks that have become full of confirmed tokens, so that they can be published and found after a preemption."""
    while request.block_names and (len(request.block_names) + 1) * BLOCK_SIZE <= request.known:
        start = len(request.block_names) * BLOCK_SIZE
        ids = [request.token_at(position) for position in range(start, start + BLOCK_SIZE)]
        request.block_names.append(chain_hash(request.block_names[-1], ids))


def private_names(names: Sequence[bytes], owner: RequestKey) -> list[bytes]:
    """The names within a namespace of `owner`'s own: only those who are given the same owner find the blocks."""
    salt = owner.gateway.to_bytes(_KEY_BYTES) + owner.id.to_bytes(_KEY_BYTES)
    return [salt + name for name in names]
