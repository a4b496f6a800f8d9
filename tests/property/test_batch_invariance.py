"""PROTOCOL.md rule 15 on the engine: a sequence's logits have the same bits whatever happens to it and whoever is with it.

Each drive follows one sequence, through chunks of any sizes, beside up to 31 others, behind blocks that another request has computed, with
preemption and recomputation, for teams of 1 to 3 threads, and compares every one of its logits with those of the sequence alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.blocks import BLOCK_SIZE
from libs.errors import TokenloomError
from services.worker.engine import Engine
from services.worker.kernels.cpu.build import ensure_library
from services.worker.ops.native import VARIANT_ENV, CpuLibrary
from tests.support.invariance import BUDGET, OUTPUTS, Drive, assert_same_bits
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import load_engine

LONGEST = 600  # three spans of attention, and a part of a stretch
THREADS = (1, 2, 3)
# What --quantization may say: each has kernels of its own.
OPTIONS: tuple[dict[str, str], ...] = ({}, {"quantization": "int8"}, {"quantization": "int4"})

drives = st.builds(
    Drive,
    length=st.integers(2, LONGEST),
    others=st.lists(st.one_of(st.integers(1, 40), st.integers(250, 300)), max_size=31),
    shared=st.integers(0, LONGEST // BLOCK_SIZE),
    preempted=st.one_of(st.none(), st.integers(0, OUTPUTS - 1)),
    most=st.sampled_from([1, 7, 16, 63, 64, 150, LONGEST]),
    threads=st.sampled_from(THREADS),
    seed=st.integers(0, 2**16),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module", params=["avx512vnni", "avx512", "avx2", "generic"])
def variant(request: pytest.FixtureRequest) -> str:
    try:
        return CpuLibrary(ensure_library(), request.param).variant
    except TokenloomError:
        pytest.skip(f"this CPU has no {request.param}")


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def engines(request: pytest.FixtureRequest, model: Path, variant: str) -> dict[int, Engine]:
    """The same model for teams of several sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIANT_ENV, variant)
        options = {"max_num_seqs": 64, "max_num_batched_tokens": BUDGET, **request.param}
        return {threads: load_engine(model, threads=threads, **options) for threads in THREADS}


@settings(max_examples=22, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drive=drives)
def test_logits_have_the_bits_that_they_have_alone(engines: dict[int, Engine], drive: Drive):
    assert_same_bits(engines, drive)
