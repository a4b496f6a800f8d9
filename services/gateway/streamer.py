"""Token deltas to text deltas: one choice of a response, as its reader takes it from the ticket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.packing import count_ids
from libs.text.decoding import IncrementalText
from services.gateway.tickets import Ticket
from tokenloom.scheduler.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Change:
    """What is new of one choice: tokens, the text that they release, and the ending when it has come."""

    index: int
    token_ids: list[int]
    text: str
    ending: scheduler_pb2.Ending | None


@dataclass(slots=True)
class Choice:
    """One choice: its ticket, its prompt (little-endian uint32) and the text held back so far.

    Deltas that piled up since the last `advance` come as one.
    """

    index: int
    ticket: Ticket
    prompt_ids: bytes = field(repr=False)
    text: IncrementalText
    ended: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it is the first choice of its prompt: the prompt and what of it was cached are counted with this one alone."""
        return self.ticket.submit.sampling.choice_index == 0

    def advance(self) -> Change | None:
        """What is new since the last call, or None. The tokens of an ending go to the text together with where it cuts."""
        ending = self.ticket.ending
        if self.ended or (ending is None and self.ticket.taken == len(self.ticket.output)):
            return None
        token_ids = self.ticket.take()
        if ending is None:
            return Change(self.index, token_ids, self.text.push(token_ids), None)
        self.ended = True
        keep = ending.keep_bytes if ending.HasField("keep_bytes") else None
        return Change(self.index, token_ids, self.text.finish(keep, token_ids), ending)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: `cached` are those of `prompt` whose KV was in the prefix cache."""

    prompt: int
    completion: int
    cached: int


def count_tokens(choices: Sequence[Choice]) -> TokenCounts:
    """Tokens of all choices, each prompt counted once: from the endings of those that have ended, else what has been delivered."""
    prompt = completion = cached = 0
    for choice in choices:
        ending = choice.ticket.ending
        completion += ending.completion_tokens if ending is not None else choice.ticket.taken
        if choice.is_first:
            prompt += ending.prompt_tokens if ending is not None else count_ids(choice.prompt_ids)
            cached += ending.cached_tokens if ending is not None else 0
    return TokenCounts(prompt, completion, cached)
