"""Block hashes: equal exactly for equal prefixes and salts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.blocks import BLOCK_SIZE, HASH_BYTES, block_hashes, blocks_for, chain_hash, root_hash

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5 * BLOCK_SIZE)


@given(IDS)
def test_there_is_one_hash_per_full_block(ids):
    hashes = block_hashes(ids)
    assert len(hashes) == len(ids) // BLOCK_SIZE
    assert all(len(name) == HASH_BYTES for name in hashes)


@given(IDS, IDS, IDS)
def test_prompts_share_exactly_the_hashes_of_their_common_full_blocks(beginning, one_end, other_end):
    first, second = beginning + one_end, beginning + other_end
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    one, other = block_hashes(first), block_hashes(second)
    common = shared // BLOCK_SIZE
    assert one[:common] == other[:common]
    assert not set(one[common:]) & set(other[common:])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=BLOCK_SIZE, max_size=5 * BLOCK_SIZE), st.binary(min_size=1, max_size=8))
def test_a_salt_changes_every_hash(ids, salt):
    assert not set(block_hashes(ids)) & set(block_hashes(ids, salt))


@given(IDS, st.binary(max_size=4))
def test_the_chain_can_be_continued_block_by_block(ids, salt):
    previous, chained = root_hash(salt), []
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        previous = chain_hash(previous, ids[start : start + BLOCK_SIZE])
        chained.append(previous)
    assert chained == block_hashes(ids, salt)


def test_equal_blocks_at_different_places_have_different_hashes():
    assert len(set(block_hashes([7] * (4 * BLOCK_SIZE)))) == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (10 * BLOCK_SIZE, 10)])
def test_tokens_fill_whole_blocks(tokens, blocks):
    assert blocks_for(tokens) == blocks
