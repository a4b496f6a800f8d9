"""The KV block ledger of one worker group: who holds which block, and which may be taken.

Every block is in exactly one of five states:

    free      nobody holds it, it has no name           -> may be allocated
    cached    nobody holds it, it is published          -> may be hit, or evicted (least recently released first)
    held      one or more leases hold it
    pending   held or draining, named at dispatch, published when its batch succeeds
    draining  released while batch `until` may still touch it; free or cached once that batch is resolved

Only full blocks are named, and only named blocks are shared, so a writable block has one holder and there is no copy-on-write.
The allocator after vLLM's idea of a block pool whose cached blocks stay allocatable (Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class LedgerError(Exception):
    """A caller broke the ledger's rules; a bug, never a condition of load."""


class OutOfBlocks(Exception):
    """Fewer blocks are available than asked for; nothing was taken."""


@dataclass(slots=True)
class Block:
    """One block's entry: leases that hold it, its name, whether that is published yet, and the newest batch of a lease that has left."""

    refs: int = 0
    name: bytes | None = None
    pending: int = 0
    until: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a prompt: blocks of its longest published head, and whether the next one is being computed right now."""

    blocks: list[int]
    next_is_pending: bool


@dataclass(slots=True)
class BlockLedger:
    """Blocks 0 .. num_blocks - 1 of one group. All methods are O(blocks touched)."""

    num_blocks: int
    _blocks: list[Block] = field(init=False)
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    _draining: dict[int, None] = field(init=False, default_factory=dict)
    _published: dict[bytes, int] = field(init=False, default_factory=dict)
    _pending: dict[bytes, int] = field(init=False, default_factory=dict)
    _resolved: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._blocks = [Block() for _ in range(self.num_blocks)]
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def draining(self) -> int:
        """Blocks that become available when the batches in flight are resolved."""
        return len(self._draining)

    @property
    def in_use(self) -> int:
        """Blocks that leases hold."""
        return self.num_blocks - self.available - self.draining

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that can be hit."""
        return len(self._cached)

    def lookup(self, names: Sequence[bytes]) -> Hit:
        """The published blocks of the longest head of `names`; takes nothing."""
        blocks: list[int] = []
        for name in names:
            block = self._published.get(name)
            if block is None:
                return Hit(blocks, name in self._pending)
            blocks.append(block)
        return Hit(blocks, False)

    def spare_without(self, blocks: Iterable[int]) -> int:
        """What `available` would be after `hold(blocks)`."""
        return self.available - sum(block in self._cached for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to published blocks."""
        for index in blocks:
            block = self._blocks[index]
            if block.name is None or self._published.get(block.name) != index:
                raise LedgerError(f"block {index} is not published")
            self._cached.pop(index, None)
            self._draining.pop(index, None)
            block.refs += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` writable blocks, free ones first, then the coldest cached ones. Raises OutOfBlocks, having taken none."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available")
        taken = []
        for _ in range(count):
            if self._free:
                index = self._free.pop()
            else:
                index, _ = self._cached.popitem(last=False)
                self._unname(index)
            self._blocks[index].refs = 1
            taken.append(index)
        return taken

    def name_pending(self, index: int, name: bytes, batch: int) -> None:
        """Batch `batch` will fill the block with the tokens that `name` stands for. A name that exists already is left to its block."""
        block = self._blocks[index]
        if block.refs != 1:
            raise LedgerError(f"block {index} is written with {block.refs} holders")
        if block.name is None and name not in self._published and name not in self._pending:
            block.name, block.pending = name, batch
            self._pending[name] = index

    def publish(self, index: int, name: bytes) -> None:
        """The block is full of confirmed tokens: it can be hit from now on, unless another block has the name."""
        block = self._blocks[index]
        if block.name == name and block.pending:
            del self._pending[name]
            block.pending = 0
            self._published[name] = index
        elif block.name is None and name not in self._published and name not in self._pending:
            block.name = name
            self._published[name] = index

    def withdraw(self, batch: int) -> None:
        """Batch `batch` failed: what it was to publish is nameless again."""
        for name, index in [*self._pending.items()]:
            if self._blocks[index].pending == batch:
                del self._pending[name]
                self._blocks[index].name, self._blocks[index].pending = None, 0

    def release(self, blocks: Sequence[int], *, after_batch: int) -> None:
        """A lease gives its blocks back, the last ones first so that heads stay cached longest.

        `after_batch`: the newest batch in flight that may touch them; 0: none.
        """
        table, draining, resolved = self._blocks, self._draining, self._resolved
        over: list[int] = []
        for index in reversed(blocks):
            block = table[index]
            if block.refs < 1:
                raise LedgerError(f"block {index} is released and nobody holds it")
            block.refs -= 1
            # Of several holders the last to leave need not be the one whose batch is in flight.
            if block.until < after_batch:
                block.until = after_batch
            if block.refs:
                continue
            if block.until > resolved:
                draining[index] = None
            else:
                over.append(index)
        self._settle(over)

    def resolve(self, batch: int) -> None:
        """Batch `batch` and all before it are over: what drained for them becomes available."""
        self._resolved = batch
        table, draining = self._blocks, self._draining
        over = [index for index in draining if table[index].until <= batch]
        for index in over:
            del draining[index]
        self._settle(over)

    def _settle(self, over: Sequence[int]) -> None:
        """Nobody holds these blocks and no batch touches them: they are free, or cached if they have a name."""
        table, free, cached = self._blocks, self._free, self._cached
        for index in over:
            block = table[index]
            block.until = 0
            if block.name is not None and block.pending:
                del self._pending[block.name]
                block.name, block.pending = None, 0
            if block.name is None:
                free.append(index)
            else:
                cached[index] = None

    def _unname(self, index: int) -> None:
        name = self._blocks[index].name
        if name is not None:
            del self._published[name]
            self._blocks[index].name = None

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """The invariant, O(blocks): raises LedgerError unless every block is in exactly one state and counts match `holders`, the block
        tables of all leases."""
        counts = [0] * self.num_blocks
        for blocks in holders:
            for index in blocks:
                counts[index] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise LedgerError("a block is free twice")
        for index, block in enumerate(self._blocks):
            places = (index in free) + (index in self._cached) + (index in self._draining) + (block.refs > 0)
            if places != 1:
                raise LedgerError(f"block {index} is in {places} states: {block}")
            if block.refs != counts[index]:
                raise LedgerError(f"block {index} counts {block.refs} holders and has {counts[index]}")
            if index in free and block.name is not None:
                raise LedgerError(f"block {index} is free and named")
            if block.refs > 1 and (block.name is None or block.pending):
                raise LedgerError(f"block {index} is shared and not published")
            where = self._pending if block.pending else self._published
            if block.name is not None and where.get(block.name) != index:
                raise LedgerError(f"block {index} is not where its name says")
        if len(self._published) + len(self._pending) != sum(block.name is not None for block in self._blocks):
            raise LedgerError("a name has no block")
