from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.worker.kv_cache import GIB, allocate, block_bytes, budget_bytes, size_cache


def test_a_block_counts_keys_and_values_of_all_layers(tiny_llama_dir: Path):
    config = ModelDirectory(tiny_llama_dir).config
    assert block_bytes(config, torch.float32) == 2 * 2 * 2 * 16 * 16 * 4
    assert block_bytes(config, torch.bfloat16) == block_bytes(config, torch.float32) // 2


def test_the_cache_has_the_shape_that_the_operations_expect(tiny_llama_dir: Path):
    layers = allocate(ModelDirectory(tiny_llama_dir).config, 5, torch.float32)
    assert len(layers) == 2
    for layer in layers:
        assert layer.keys.shape == layer.values.shape == (5, 2, 16, 16)
        assert layer.keys.stride(2) == 1, "tokens of a block lie side by side"


def test_all_layers_parts_of_a_block_lie_side_by_side(tiny_llama_dir: Path):
    config = ModelDirectory(tiny_llama_dir).config
    layers, size = allocate(config, 5, torch.float32), block_bytes(config, torch.float32)
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    starts = [[part[block].data_ptr() for part in parts] for block in range(5)]
    assert [start[0] for start in starts] == [starts[0][0] + block * size for block in range(5)]
    for start in starts:
        assert [at - start[0] for at in start] == list(range(0, size, size // len(parts)))


def test_the_budget_is_what_was_asked_for_or_a_share_or_a_modest_default():
    assert budget_bytes(wanted=123, utilization=0.5, memory=GIB, weights=0) == 123
    assert budget_bytes(wanted=None, utilization=0.5, memory=10 * GIB, weights=2 * GIB) == 3 * GIB
    assert budget_bytes(wanted=None, utilization=None, memory=100 * GIB, weights=0) == 4 * GIB
    assert budget_bytes(wanted=None, utilization=None, memory=8 * GIB, weights=0) == 2 * GIB
    with pytest.raises(TokenloomError, match="less than the weights"):
        budget_bytes(wanted=None, utilization=0.1, memory=10 * GIB, weights=2 * GIB)


@given(budget=st.integers(1, 10**6), wanted=st.one_of(st.none(), st.integers(1, 4096)), model_len=st.integers(1, 4096))
def test_a_cache_that_is_granted_holds_its_longest_sequence(budget: int, wanted: int | None, model_len: int):
    blocks = budget // 1000
    if blocks < 1 or (wanted is not None and (wanted > model_len or wanted > blocks * 16)):
        with pytest.raises(TokenloomError) as caught:
            size_cache(budget=budget, bytes_per_block=1000, wanted_len=wanted, model_len=model_len)
        assert caught.value.code in (ErrorCode.CANNOT_FIT, ErrorCode.INVALID_REQUEST)
        return
    size = size_cache(budget=budget, bytes_per_block=1000, wanted_len=wanted, model_len=model_len)
    assert size.num_blocks * 1000 <= budget
    assert 1 <= size.max_model_len <= min(size.num_blocks * 16, model_len)
    assert wanted is None or size.max_model_len == wanted


def test_a_length_that_was_asked_for_is_refused_not_lowered():
    with pytest.raises(TokenloomError, match=r"holds 160 tokens, --max-model-len asks for 200.* at least 13000"):
        size_cache(budget=10_000, bytes_per_block=1000, wanted_len=200, model_len=4096)
    with pytest.raises(TokenloomError, match="exceeds the model's 100"):
        size_cache(budget=10**6, bytes_per_block=1000, wanted_len=200, model_len=100)
