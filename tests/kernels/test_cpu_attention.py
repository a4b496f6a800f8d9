"""C++ paged attention against the reference, for every instruction set that this CPU has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.errors import TokenloomError
from services.worker.kernels.cpu.build import BuildError, ensure_library, find_compiler
from services.worker.ops.base import HeadShape, LayerCache, StepInputs
from services.worker.ops.cpu import CpuOps
from services.worker.ops.cpu_kernels import VARIANT_ENV, CpuKernels
from services.worker.ops.reference import ReferenceOps

BLOCK = 16


@dataclass(frozen=True)
class Case:
    queries: torch.Tensor
    cache: LayerCache
    inputs: StepInputs
    heads: HeadShape


def make_case(rows: list[tuple[int, int]], heads: HeadShape, seed: int = 0) -> Case:
    """Rows are (tokens already computed, tokens of this step). Blocks are dealt out shuffled; what no row owns is NaN, to be left alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [start + count for start, count in rows]
    tables = np.zeros((len(rows), max(-(-length // BLOCK) for length in lengths)), np.int32)
    owned = sum(-(-length // BLOCK) for length in lengths)
    free = iter(np.random.default_rng(seed).permutation(owned + 3).tolist())
    keys = torch.full((owned + 3, heads.kv_heads, heads.head_dim, BLOCK), float("nan")).transpose(2, 3)
    values = torch.full((owned + 3, heads.kv_heads, BLOCK, heads.head_dim), float("nan"))
    for row, length in enumerate(lengths):
        for position in range(length):
            if position % BLOCK == 0:
                tables[row, position // BLOCK] = next(free)
            block, offset = tables[row, position // BLOCK], position % BLOCK
            keys[block, :, offset] = torch.randn(heads.kv_heads, heads.head_dim, generator=generator) * 2
            values[block, :, offset] = torch.randn(heads.kv_heads, heads.head_dim, generator=generator)
    counts = [count for _, count in rows]
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    inputs = StepInputs(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=positions,
        cache_slots=torch.zeros(sum(counts), dtype=torch.int64),
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        sampled=torch.zeros(0, dtype=torch.int64),
        longest=max(lengths),
    )
    queries = torch.randn(sum(counts), heads.query_heads, heads.head_dim, generator=generator)
    return Case(queries, LayerCache(keys, values), inputs, heads)


HEADS = [HeadShape(9, 3, 64), HeadShape(4, 4, 16), HeadShape(32, 1, 128), HeadShape(8, 2, 256), HeadShape(5, 1, 80)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_match_the_reference(ops: CpuOps, heads: HeadShape, seed: int):
    random = np.random.default_rng(seed)
    rows = [(int(random.integers(0, 200)), int(random.choice([1, 1, 1, 2, 15, 16, 17, 70]))) for _ in range(int(random.integers(1, 9)))]
    case = make_case(rows, heads, seed)
    scale = heads.head_dim**-0.5
    expected = ReferenceOps().attention(case.queries, case.cache, case.inputs, heads, scale)
    actual = ops.attention(case.queries, case.cache, case.inputs, heads, scale)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_a_sequence_of_one_token_returns_its_value(ops: CpuOps):
    case = make_case([(0, 1)], HeadShape(6, 2, 32))
    actual = ops.attention(case.queries, case.cache, case.inputs, case.heads, 0.2).view(6, 32)
    value = case.cache.values[case.inputs.block_tables[0, 0], :, 0]
    assert torch.equal(actual, value.repeat_interleave(3, dim=0))


def test_large_scores_do_not_overflow(ops: CpuOps):
    case = make_case([(40, 3)], HeadShape(2, 1, 16))
    expected = ReferenceOps().attention(case.queries * 1e4, case.cache, case.inputs, case.heads, 1.0)
    torch.testing.assert_close(ops.attention(case.queries * 1e4, case.cache, case.inputs, case.heads, 1.0), expected, atol=1e-4, rtol=1e-4)


def test_a_row_is_bit_identical_alone_in_company_and_in_chunks(ops: CpuOps):
    heads = HeadShape(9, 3, 64)
    case = make_case([(0, 90), (130, 1), (33, 40)], heads, seed=4)
    together = ops.attention(case.queries, case.cache, case.inputs, heads, 0.125)
    for row, (start, count) in enumerate([(0, 90), (130, 1), (33, 40)]):
        first = int(case.inputs.query_starts[row])
        for at in range(0, count, 7):
            size = min(7, count - at)
            part = StepInputs(
                token_ids=case.inputs.token_ids[:size],
                positions=torch.arange(start + at, start + at + size),
                cache_slots=case.inputs.cache_slots[:size],
                query_starts=torch.tensor([0, size], dtype=torch.int32),
                kv_lengths=torch.tensor([start + at + size], dtype=torch.int32),
                block_tables=case.inputs.block_tables[row : row + 1].contiguous(),
                sampled=case.inputs.sampled,
                longest=start + at + size,
            )
            tokens = slice(first + at, first + at + size)
            alone = ops.attention(case.queries[tokens].contiguous(), case.cache, part, heads, 0.125)
            assert torch.equal(alone, together[tokens])


def test_the_best_instruction_set_is_chosen_and_can_be_forced(library: Path, monkeypatch: pytest.MonkeyPatch):
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    monkeypatch.delenv(VARIANT_ENV, raising=False)
    if "avx512f" in flags:
        assert CpuKernels(library).variant == "avx512"
    elif "avx2" in flags:
        assert CpuKernels(library).variant == "avx2"
    monkeypatch.setenv(VARIANT_ENV, "generic")
    assert CpuKernels(library).variant == "generic"
    with pytest.raises(TokenloomError, match="vax"):
        CpuKernels(library, "vax")


def test_it_shares_torchs_team_of_threads(library: Path):
    """Two OpenMP runtimes in one process would fight for the cores."""
    CpuKernels(library)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line or "libiomp" in line}
    assert len(mapped) == 1


def test_building_again_finds_what_was_built(library: Path):
    before = library.stat().st_mtime_ns
    assert ensure_library() == library
    assert library.stat().st_mtime_ns == before


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        find_compiler()


def test_heads_that_the_kernels_do_not_take_are_known():
    assert CpuKernels.supports(HeadShape(9, 3, 64))
    assert not CpuKernels.supports(HeadShape(9, 3, 40))
    assert not CpuKernels.supports(HeadShape(2, 1, 272))
    assert not CpuKernels.supports(HeadShape(64, 1, 64))
