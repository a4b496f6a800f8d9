"""Token deltas to text deltas: one choice of a response, as its reader takes it from the ticket."""

from __future__ import annotations

from dataclasses import dataclass, field

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
