"""The block ledger: five states, one of them at a time, and names only for blocks that deserve them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.ledger import BlockLedger, LedgerError, OutOfBlocks


def published(ledger: BlockLedger, *names: bytes) -> list[int]:
    """Blocks held once, published under `names`."""
    blocks = ledger.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        ledger.publish(block, name)
    return blocks


def test_all_blocks_are_free_at_first():
    ledger = BlockLedger(4)
    assert (ledger.available, ledger.in_use, ledger.cached, ledger.draining) == (4, 0, 0, 0)


def test_a_shortage_takes_nothing():
    ledger = BlockLedger(2)
    with pytest.raises(OutOfBlocks):
        ledger.allocate(3)
    assert ledger.available == 2


def test_a_published_block_stays_cached_after_its_release_and_can_be_hit():
    ledger = BlockLedger(2)
    blocks = published(ledger, b"a")
    ledger.release(blocks, after_batch=0)
    assert ledger.cached == 1
    hit = ledger.lookup([b"a", b"b"])
    assert (hit.blocks, hit.next_is_pending) == (blocks, False)
    ledger.hold(hit.blocks)
    assert (ledger.cached, ledger.in_use) == (0, 1)
    ledger.check([hit.blocks])


def test_a_hit_ends_at_the_first_name_that_is_missing():
    ledger = BlockLedger(3)
    blocks = published(ledger, b"a", b"c")
    assert ledger.lookup([b"a", b"b", b"c"]).blocks == blocks[:1]


def test_unnamed_blocks_are_free_again_after_their_release():
    ledger = BlockLedger(2)
    ledger.release(ledger.allocate(2), after_batch=0)
    assert (ledger.available, ledger.cached) == (2, 0)


def test_cached_blocks_are_evicted_coldest_first_and_only_when_nothing_is_free():
    ledger = BlockLedger(3)
    old = published(ledger, b"old")
    new = published(ledger, b"new")
    ledger.release(old, after_batch=0)
    ledger.release(new, after_batch=0)
    assert ledger.allocate(1) != old
    assert ledger.allocate(1) == old
    assert ledger.lookup([b"old"]).blocks == []
    assert ledger.lookup([b"new"]).blocks == new


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head():
    ledger = BlockLedger(2)
    head, tail = published(ledger, b"head", b"tail")
    ledger.release([head, tail], after_batch=0)
    assert ledger.allocate(1) == [tail]


def test_a_shared_block_is_held_until_its_last_holder_goes():
    ledger = BlockLedger(1)
    blocks = published(ledger, b"a")
    ledger.hold(blocks)
    ledger.release(blocks, after_batch=0)
    assert ledger.in_use == 1
    ledger.release(blocks, after_batch=0)
    assert (ledger.in_use, ledger.cached) == (0, 1)


def test_a_block_that_a_batch_may_still_touch_drains_until_that_batch_is_over():
    ledger = BlockLedger(2)
    blocks = ledger.allocate(2)
    ledger.release(blocks, after_batch=7)
    assert (ledger.available, ledger.draining) == (0, 2)
    ledger.resolve(6)
    assert ledger.draining == 2
    ledger.resolve(7)
    assert (ledger.available, ledger.draining) == (2, 0)


def test_a_later_batch_resolves_what_drained_for_an_earlier_one():
    ledger = BlockLedger(1)
    ledger.release(ledger.allocate(1), after_batch=3)
    ledger.resolve(9)
    assert ledger.available == 1


def test_a_draining_block_can_be_hit_and_does_not_fall_free_under_its_new_holder():
    ledger = BlockLedger(1)
    blocks = published(ledger, b"a")
    ledger.release(blocks, after_batch=4)
    ledger.hold(blocks)
    ledger.resolve(4)
    assert (ledger.in_use, ledger.available) == (1, 0)
    ledger.check([blocks])


def test_a_shared_block_drains_for_the_batch_of_a_holder_that_left_earlier():
    ledger = BlockLedger(1)
    blocks = published(ledger, b"a")
    ledger.hold(blocks)
    ledger.release(blocks, after_batch=7)
    ledger.release(blocks, after_batch=0)
    assert (ledger.available, ledger.draining) == (0, 1)
    ledger.resolve(7)
    assert (ledger.cached, ledger.draining) == (1, 0)


def test_a_shared_block_does_not_drain_for_a_batch_that_is_over():
    ledger = BlockLedger(1)
    blocks = published(ledger, b"a")
    ledger.hold(blocks)
    ledger.release(blocks, after_batch=7)
    ledger.resolve(7)
    ledger.release(blocks, after_batch=0)
    assert (ledger.cached, ledger.draining) == (1, 0)


def test_a_pending_block_is_no_hit_but_says_that_it_is_being_computed():
    ledger = BlockLedger(1)
    (block,) = ledger.allocate(1)
    ledger.name_pending(block, b"a", 1)
    hit = ledger.lookup([b"a"])
    assert (hit.blocks, hit.next_is_pending) == ([], True)
    ledger.publish(block, b"a")
    assert ledger.lookup([b"a"]).blocks == [block]


def test_a_failed_batch_withdraws_its_names_and_no_others():
    ledger = BlockLedger(2)
    first, second = ledger.allocate(2)
    ledger.name_pending(first, b"a", 1)
    ledger.name_pending(second, b"b", 2)
    ledger.withdraw(1)
    assert not ledger.lookup([b"a"]).next_is_pending
    assert ledger.lookup([b"b"]).next_is_pending
    ledger.check([[first, second]])


def test_a_block_released_before_its_batch_succeeded_is_cached_once_it_has():
    ledger = BlockLedger(1)
    (block,) = ledger.allocate(1)
    ledger.name_pending(block, b"a", 5)
    ledger.release([block], after_batch=5)
    ledger.publish(block, b"a")
    ledger.resolve(5)
    assert ledger.lookup([b"a"]).blocks == [block]


def test_a_block_whose_batch_never_confirmed_it_loses_its_name():
    ledger = BlockLedger(1)
    (block,) = ledger.allocate(1)
    ledger.name_pending(block, b"a", 5)
    ledger.release([block], after_batch=5)
    ledger.resolve(5)
    hit = ledger.lookup([b"a"])
    assert (hit.blocks, hit.next_is_pending, ledger.cached) == ([], False, 0)


@pytest.mark.parametrize("pending", [False, True])
def test_a_name_belongs_to_the_block_that_had_it_first(pending: bool):
    ledger = BlockLedger(2)
    first, second = ledger.allocate(2)
    if pending:
        ledger.name_pending(first, b"a", 1)
        ledger.name_pending(second, b"a", 1)
    else:
        ledger.publish(first, b"a")
        ledger.publish(second, b"a")
    ledger.release([second], after_batch=0)
    assert ledger.cached == 0
    ledger.check([[first]])


def test_spare_without_does_not_count_the_hits_themselves():
    ledger = BlockLedger(3)
    blocks = published(ledger, b"a", b"b")
    ledger.release(blocks, after_batch=0)
    assert ledger.available == 3
    assert ledger.spare_without(blocks) == 1


def test_holding_what_is_not_published_is_a_bug():
    ledger = BlockLedger(1)
    with pytest.raises(LedgerError, match="not published"):
        ledger.hold(ledger.allocate(1))


def test_writing_a_shared_block_is_a_bug():
    ledger = BlockLedger(1)
    blocks = published(ledger, b"a")
    ledger.hold(blocks)
    with pytest.raises(LedgerError, match="2 holders"):
        ledger.name_pending(blocks[0], b"b", 1)


def test_releasing_twice_is_a_bug():
    ledger = BlockLedger(1)
    blocks = ledger.allocate(1)
    ledger.release(blocks, after_batch=0)
    with pytest.raises(LedgerError, match="nobody holds"):
        ledger.release(blocks, after_batch=0)


class TestCheckCatches:
    """Each way to break the ledger, done behind its back."""

    @pytest.fixture
    def ledger(self) -> BlockLedger:
        ledger = BlockLedger(4)
        self.held = published(ledger, b"a", b"b")
        ledger.check([self.held])
        return ledger

    def test_a_block_in_two_states(self, ledger: BlockLedger):
        ledger._free.append(self.held[0])
        with pytest.raises(LedgerError, match="2 states"):
            ledger.check([self.held])

    def test_a_lost_block(self, ledger: BlockLedger):
        ledger._free.pop()
        with pytest.raises(LedgerError, match="0 states"):
            ledger.check([self.held])

    def test_a_block_that_is_free_twice(self, ledger: BlockLedger):
        ledger._free.append(ledger._free[0])
        with pytest.raises(LedgerError, match="free twice"):
            ledger.check([self.held])

    def test_a_holder_that_is_not_counted(self, ledger: BlockLedger):
        with pytest.raises(LedgerError, match="counts 1 holders and has 2"):
            ledger.check([self.held, self.held[:1]])

    def test_a_count_without_a_holder(self, ledger: BlockLedger):
        with pytest.raises(LedgerError, match="counts 1 holders and has 0"):
            ledger.check([self.held[1:]])

    def test_a_free_block_with_a_name(self, ledger: BlockLedger):
        ledger._blocks[ledger._free[0]].name = b"c"
        with pytest.raises(LedgerError, match="free and named"):
            ledger.check([self.held])

    def test_a_shared_block_without_a_name(self, ledger: BlockLedger):
        (block,) = ledger.allocate(1)
        ledger._blocks[block].refs = 2
        with pytest.raises(LedgerError, match="shared and not published"):
            ledger.check([self.held, [block], [block]])

    def test_a_name_that_leads_elsewhere(self, ledger: BlockLedger):
        ledger._published[b"a"] = self.held[1]
        with pytest.raises(LedgerError, match="not where its name says"):
            ledger.check([self.held])

    def test_a_name_without_a_block(self, ledger: BlockLedger):
        ledger._published[b"z"] = 3
        with pytest.raises(LedgerError, match="a name has no block"):
            ledger.check([self.held])


class LedgerMachine(RuleBasedStateMachine):
    """Random leases, batches and names against a model: which lease holds what, and what each block has been promised to contain."""

    @initialize(blocks=st.integers(1, 8))
    def start(self, blocks: int) -> None:
        self.ledger = BlockLedger(blocks)
        self.leases: list[list[int]] = []
        self.batch, self.over = 0, 0
        self.pending: dict[int, list[tuple[int, bytes]]] = {}
        self.draining: dict[int, int] = {}
        self.readable: dict[int, bytes] = {}

    def free_for_use(self, block: int) -> bool:
        return not any(block in lease for lease in self.leases) and self.draining.get(block, 0) <= self.over

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count > self.ledger.available:
            with_error = self.ledger.available
            with pytest.raises(OutOfBlocks):
                self.ledger.allocate(count)
            assert self.ledger.available == with_error
            return
        blocks = self.ledger.allocate(count)
        for block in blocks:
            assert self.free_for_use(block), "a block was given away that somebody holds or a batch may touch"
            self.readable.pop(block, None)
            self.draining.pop(block, None)
        self.leases.append(blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def dispatch_a_batch_that_fills_a_block(self, data: st.DataObject, name: bytes) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        block = lease[-1]
        self.batch += 1
        self.pending[self.batch] = []
        promised = any(block == other for names in self.pending.values() for other, _ in names)
        if sum(block in other for other in self.leases) == 1 and block not in self.readable and not promised:
            self.ledger.name_pending(block, name, self.batch)
            self.pending[self.batch].append((block, name))

    @precondition(lambda self: self.over < self.batch)
    @rule(succeeds=st.booleans())
    def the_oldest_batch_ends(self, succeeds: bool) -> None:
        self.over += 1
        for block, name in self.pending.pop(self.over):
            if succeeds:
                self.ledger.publish(block, name)
                self.readable.setdefault(block, name)
        if not succeeds:
            self.ledger.withdraw(self.over)
        self.ledger.resolve(self.over)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        after = self.batch if self.batch > self.over else 0
        self.ledger.release(lease, after_batch=after)
        for block in lease:
            self.draining[block] = max(after, self.draining.get(block, 0))

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=2, unique=True))
    def hit(self, names: list[bytes]) -> None:
        found = self.ledger.lookup(names).blocks
        for block, name in zip(found, names, strict=False):
            assert self.readable.get(block) == name, "a hit leads to a block that was never confirmed to hold it"
        before = self.ledger.spare_without(found)
        if found:
            self.ledger.hold(found)
            self.leases.append(found)
        assert self.ledger.available == before

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check(self.leases)
            assert self.ledger.available + self.ledger.in_use + self.ledger.draining == self.ledger.num_blocks


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerAgainstAModel = LedgerMachine.TestCase
