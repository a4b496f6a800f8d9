from __future__ import annotations

import pytest

from libs.errors import ErrorCode
from services.worker.chain import Chain


@pytest.fixture
def chain() -> Chain:
    chain = Chain()
    chain.restart(3)
    return chain


def runs(chain: Chain, number: int, predecessor: int, epoch: int = 3) -> bool:
    refusal = chain.check(epoch, number, predecessor)
    assert refusal is None or refusal.code is ErrorCode.STALE_BATCH
    return refusal is None


def test_batches_run_after_their_predecessor_only(chain: Chain):
    assert runs(chain, 1, 0)
    chain.completed(1, 1)
    assert runs(chain, 2, 1)
    assert not runs(chain, 3, 2)


def test_another_epoch_is_stale(chain: Chain):
    assert not runs(chain, 1, 0, epoch=2)
    assert not runs(chain, 1, 0, epoch=4)


def test_a_number_runs_once(chain: Chain):
    chain.completed(4, 4)
    assert not runs(chain, 4, 0)
    assert not runs(chain, 2, 0)


def test_after_a_failure_its_successor_does_not_run_and_a_new_start_does(chain: Chain):
    chain.completed(1, 1)
    chain.broken(2, 2, 2)
    assert not runs(chain, 3, 2)
    assert runs(chain, 4, 0)
    assert runs(chain, 4, 1), "slots are as batch 1 left them"


def test_a_lease_that_failed_in_part_is_nobodys_predecessor(chain: Chain):
    chain.completed(1, 1)
    chain.broken(2, 4, 6)
    assert not any(runs(chain, 7, predecessor) for predecessor in range(1, 7))
    assert runs(chain, 7, 0)


def test_a_lease_may_be_named_by_any_of_its_steps(chain: Chain):
    chain.completed(2, 5)
    assert runs(chain, 6, 2)
    assert runs(chain, 6, 5)
    assert not runs(chain, 5, 2)


def test_a_new_attach_begins_anew(chain: Chain):
    chain.completed(9, 9)
    chain.restart(4)
    assert runs(chain, 1, 0, epoch=4)
    assert not runs(chain, 10, 9, epoch=4)
