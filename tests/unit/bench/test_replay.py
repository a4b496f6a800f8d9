"""Recorded batches run again by a runner alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench.replay import LoneRunner
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.step_log import LoggedStep
from tokenloom.worker.v1 import worker_pb2


def batches(blocks: int = 1) -> list[LoggedStep]:
    """A prompt and three tokens more, the last two by a lease, as the third to fifth step of some epoch."""
    opening = worker_pb2.Open(
        slot=0,
        request="r",
        prompt_ids=pack_ids([5, 6, 7]),
        sampling=SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True).to_proto(),
    )
    first = worker_pb2.StepBatch(epoch=9, number=3, predecessor=2, lease_steps=1, opens=[opening], slots=[0], counts=[3], samples=b"\1")
    first.new_block_counts.append(blocks)
    first.new_block_ids = pack_ids(range(blocks))
    then = worker_pb2.StepBatch(epoch=9, number=4, predecessor=3, lease_steps=2, slots=[0], counts=[1], samples=b"\1", new_block_counts=[0])
    nothing = worker_pb2.StepResult()
    return [LoggedStep(1, first, nothing), LoggedStep(2, then, nothing), LoggedStep(3, None, nothing)]


def test_each_replay_begins_anew_and_computes_the_same(tiny_llama_dir: Path):
    config = WorkerConfig.model_validate({"model": tiny_llama_dir, "kv_cache_memory_bytes": 64 << 20, "threads": 1})
    lone = LoneRunner(config)
    runs = [lone.replay(batches()) for _ in range(2)]
    assert [[step.result.number for step in run] for run in runs] == [[3, 4, 5]] * 2
    assert [step.batch is None for step in runs[0]] == [False, False, True]
    tokens = [[unpack_ids(step.result.token_ids) for step in run] for run in runs]
    assert tokens[0] == tokens[1]
    with pytest.raises(RuntimeError, match="step 3 did not run"):
        lone.replay(batches(blocks=0))
    lone.close()


def test_a_lease_that_was_cut_runs_as_many_steps_as_it_did(tiny_llama_dir: Path):
    lone = LoneRunner(WorkerConfig.model_validate({"model": tiny_llama_dir, "kv_cache_memory_bytes": 64 << 20, "threads": 1}))
    first, then, later = batches()
    then.batch.lease_steps = 5  # type: ignore[union-attr]
    last = worker_pb2.StepBatch(epoch=9, number=6, predecessor=5, closes=[0])
    run = lone.replay([first, then, later, LoggedStep(4, last, worker_pb2.StepResult())])
    assert [(step.result.number, len(step.result.token_counts)) for step in run] == [(3, 1), (4, 1), (5, 1), (6, 0)]
    lone.close()


def test_the_runner_keeps_to_its_core_as_a_workers_does(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch):
    settled = list[int]()
    monkeypatch.setattr(Engine, "settle", lambda self: settled.append(threading.get_ident()))
    LoneRunner(WorkerConfig.model_validate({"model": tiny_llama_dir, "kv_cache_memory_bytes": 64 << 20, "threads": 1})).close()
    assert settled
    assert threading.get_ident() not in settled
