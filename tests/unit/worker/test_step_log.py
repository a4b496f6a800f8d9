"""The file of recorded steps, and what the runner writes to it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from libs.errors import TokenloomError
from services.worker.step_log import LoggedStep, StepLog, read_steps
from tests.unit.worker.test_runner import Bench
from tokenloom.worker.v1 import worker_pb2


def logged(number: int, *, later: bool = False) -> LoggedStep:
    batch = None if later else worker_pb2.StepBatch(number=number, slots=[1], counts=[1])
    return LoggedStep(10**12 + number, batch, worker_pb2.StepResult(number=number))


def test_what_is_written_is_read_and_what_is_not_whole_yet_is_not(tmp_path: Path):
    path = tmp_path / "steps"
    log, steps = StepLog(path), [logged(1), logged(2, later=True), logged(3)]
    for step in steps[:2]:
        log.write(step)
    middle = path.stat().st_size
    log.write(steps[2])
    log.close()
    assert list(read_steps(path)) == steps
    assert list(read_steps(path, middle)) == steps[2:]
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read_steps(path)) == steps[:2]


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path):
    with pytest.raises(TokenloomError, match="--record-steps"):
        StepLog(tmp_path / "no" / "steps")


def test_the_runner_records_each_step_that_ran_with_its_batch(tmp_path: Path):
    path = tmp_path / "steps"
    bench = Bench(StepLog(path))
    numbers = [bench.open(1).number]
    bench.send(2, 1, lease_steps=3)
    numbers += [bench.result().number for _ in range(3)]
    bench.runner.stop()
    steps = list(read_steps(path))
    assert [step.result.number for step in steps] == numbers == [1, 2, 3, 4]
    assert [step.batch.number if step.batch is not None else None for step in steps] == [1, 2, None, None]
    assert [step.began_ns for step in steps] == sorted(step.began_ns for step in steps)


def test_a_full_disk_ends_the_recording_and_nothing_else():
    bench = Bench(StepLog(Path("/dev/full")))
    assert bench.open(1).outcome == worker_pb2.BATCH_OUTCOME_OK
    bench.send(2, 1)
    assert bench.result().outcome == worker_pb2.BATCH_OUTCOME_OK
    bench.runner.stop()


def test_a_file_that_another_worker_writes_to_is_refused_until_that_one_has_ended(tmp_path: Path):
    log = StepLog(tmp_path / "steps")
    with pytest.raises(TokenloomError, match="another worker writes to it"):
        StepLog(tmp_path / "steps")
    log.write(logged(1))
    log.close()
    after = StepLog(tmp_path / "steps")
    after.write(logged(2))
    after.close()
    assert list(read_steps(tmp_path / "steps")) == [logged(1), logged(2)]


def test_a_step_that_is_not_written_whole_is_an_error_and_leaves_nothing(tmp_path: Path):
    log = StepLog(tmp_path / "steps")
    log.write(logged(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "steps").stat().st_size + 5, before[1]))
        with pytest.raises(OSError, match="5 of"):
            log.write(logged(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(logged(3))
    log.close()
    assert list(read_steps(tmp_path / "steps")) == [logged(1), logged(3)]
