"""What worlds of the scheduler's core are made of: their sizes, and a group with its worker and what is between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from libs.blocks import BLOCK_SIZE
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from services.scheduler.core.checks import Prepare
from services.scheduler.core.group import Group
from services.scheduler.core.plan import Cut, StepOutcome, StepPlan
from services.scheduler.core.state import Limits
from tests.support.core_leases import LeaseRunner
from tests.support.model_worker import ModelWorker, text_table
from tokenloom.worker.v1 import worker_pb2

GATEWAYS = (7, 8)
# Six blocks, so that the smallest cache holds one sequence of full length and hardly a second.
MAX_MODEL_LEN = 96
TABLE = text_table()
OUT_OF_MEMORY = TokenloomError(ErrorCode.OUT_OF_MEMORY, "out of memory")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and switches of a world. `blocks`: cache sizes that groups come with, in turn; `in_flight`: batches a group takes at once;
    `lease_steps`: most steps of a lease; `most_idle`: constraints that nobody wants and that groups keep;
    `enough`: tokens of prompts after which none begins."""

    groups: int = 1
    blocks: tuple[int, ...] = (8,)
    slots: int = 4
    sequences: int = 4
    budget: int = 32
    in_flight: int = 2
    distance: int = 1
    caching: bool = True
    chunked: bool = True
    most_live: int = 12
    most_live_tokens: int = 0
    policy: str = "fcfs"
    lease_steps: int = 1
    most_idle: int = 256
    enough: int = 0

    def limits(self) -> Limits:
        """The core's limits in such a world."""
        return Limits(
            max_tokens_per_step=self.budget if self.chunked else max(self.budget, MAX_MODEL_LEN),
            max_sequences=self.sequences,
            max_requests=self.most_live,
            max_live_tokens=self.most_live_tokens,
            max_model_len=MAX_MODEL_LEN,
            chunked_prefill=self.chunked,
            prefix_caching=self.caching,
            enough_prefill=self.enough,
        )

    def group(self, name: str, epoch: int, blocks: int) -> Group:
        """A group that has just attached."""
        return Group.new(name, epoch, num_blocks=blocks, num_slots=self.slots, max_in_flight=self.in_flight, distance=self.distance)


@dataclass(slots=True)
class Rig:
    """One attached group with its worker and what is on its way in either direction.

    `plans`: those of the steps that the worker was given, by number; `cuts`: not arrived yet; `asked`: first numbers of leases with a cut.
    `broken`: a batch failed or was refused, and the next one that runs must name no predecessor.
    Constraints: `prepares` wait for the worker's compiler, `verdicts` are on their way back; `owed`: ids that the core waits for, what each
    is `about`, what the core has heard (`said`: the error, None: it is ready), and when an error is `void` and asked about again.
    """

    group: Group
    worker: ModelWorker
    runner: LeaseRunner = field(init=False)
    plans: dict[int, StepPlan] = field(default_factory=dict)
    cuts: deque[Cut] = field(default_factory=deque)
    answers: deque[StepOutcome | Cut] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)
    broken: bool = False
    prepares: list[Prepare] = field(default_factory=list)
    verdicts: deque[worker_pb2.Prepared] = field(default_factory=deque)
    owed: set[int] = field(default_factory=set)
    about: dict[int, Constraint] = field(default_factory=dict)
    said: dict[Constraint, TokenloomError | None] = field(default_factory=dict)
    void: dict[Constraint, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = LeaseRunner(self.worker)


def block_edge_prompt(head: int, length: int) -> list[int]:
    """A prompt of `length` tokens that shares its first blocks with every other of the same `head`; 0 shares with nobody but itself."""
    shared = [head] * min(length, 2 * BLOCK_SIZE)
    return [*shared, *((head * 7 + position * position) % 9 + 1 for position in range(length - len(shared)))]
