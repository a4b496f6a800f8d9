"""KV blocks as every service counts and names them: 16 tokens each, named by a chained hash of all tokens up to their end.

    tokens   | t0 .. t15 | t16 .. t31 | t32 .. t40 |
    block    |     0     |      1     |  2 (not full, no name)
    hash     h0 = H(salt, t0..t15)   h1 = H(h0, t16..t31)

Two prompts share block i exactly when they share every token up to its end and the salt. 16 bytes of BLAKE2b: a collision would need
about 2**64 blocks. The tokenizer service hashes prompts (8,000 blocks take 5 ms); the scheduler extends the chain over outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from libs.packing import pack_ids

BLOCK_SIZE = 16
HASH_BYTES = 16


def root_hash(salt: bytes = b"") -> bytes:
    """What the first block's hash chains from; differs for every salt."""
    return blake2b(salt, digest_size=HASH_BYTES, person=b"tokenloom-block").digest()


def chain_hash(previous: bytes, block: Sequence[int]) -> bytes:
    """The hash of a full block of BLOCK_SIZE ids that follows the block named `previous` (or root_hash)."""
    return blake2b(previous + pack_ids(block), digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """The chained hashes of every full block of `token_ids`."""
    hashes, previous = [], root_hash(salt)
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        previous = chain_hash(previous, token_ids[start : start + BLOCK_SIZE])
        hashes.append(previous)
    return hashes


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)
