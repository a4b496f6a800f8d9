"""One worker group as the core sees it: its blocks, its slots, who runs there, and the chain of batches in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from libs.blocks import BLOCK_SIZE
from services.scheduler.core.ledger import BlockLedger
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.request import Request, Residency


@dataclass(slots=True)
class Group:
    """One worker group: its blocks, slots, running requests in the order of their ranks, and the chain of batches in flight.

    `chain_head`: the predecessor of the next batch (0: none). `broken`: a batch failed, and those behind it have not all reported;
    `suspects` stood in it. `most_tokens`: the token budget that the worker's memory allows, once it ran out (None: it never did).
    `closing`: slots that the worker may forget. `max_model_len`: longest sequence that it runs (None: whatever its blocks hold).
    """

    name: str
    epoch: int
    ledger: BlockLedger
    free_slots: list[int]
    max_in_flight: int = 2
    feed_forward_distance: int = 1
    running: list[Request] = field(default_factory=list)
    in_flight: deque[StepPlan] = field(default_factory=deque)
    closing: set[int] = field(default_factory=set)
    last_number: int = 0
    chain_head: int = 0
    broken: bool = False
    suspects: list[Request] = field(default_factory=list)
    admissions: int = 0
    most_tokens: int | None = None
    max_model_len: int | None = None

    @classmethod
    def new(cls, name: str, epoch: int, *, num_blocks: int, num_slots: int, max_in_flight: int = 2, distance: int = 1) -> Group:
        """A group that has just attached: empty."""
        return cls(name, epoch, BlockLedger(num_blocks), list(range(num_slots - 1, -1, -1)), max_in_flight, distance)

    @property
    def reserve(self) -> int:
        """Blocks that are left to those who run, to grow into."""
        return max(1, self.ledger.num_blocks // 100) if self.running else 0

    def holds(self, request: Request) -> bool:
        """Whether the request fits this group to its last token, were it alone there."""
        fits = self.max_model_len is None or request.most_tokens <= self.max_model_len
        return fits and request.most_blocks <= self.ledger.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that it can hold alone."""
        held = self.ledger.num_blocks * BLOCK_SIZE
        return held if self.max_model_len is None else min(held, self.max_model_len)

    def last_touch(self, residency: Residency) -> int:
        """The newest batch in flight that may touch the residency's blocks; 0: none."""
        return residency.last_batch if self.in_flight and residency.last_batch >= self.in_flight[0].number else 0

    def check(self) -> None:
        """The ledger's invariant against this group's block tables; slots against running requests. Raises LedgerError or ValueError."""
        residencies = [request.residency for request in self.running if request.residency]
        self.ledger.check(residency.blocks for residency in residencies)
        used = [residency.slot for residency in residencies]
        if len(set(used + self.free_slots)) != len(used) + len(self.free_slots):
            raise ValueError("a slot is used twice")
        ranks = [residency.rank for residency in residencies]
        if ranks != sorted(ranks):
            raise ValueError(f"running requests stand out of their order: {ranks}")


def rank_of(request: Request) -> tuple[int, int]:
    """The place of a request among those that run in its group. Raises ValueError for one that does not run."""
    if request.residency is None:
        raise ValueError(f"request {request.key} holds no place")
    return request.residency.rank
