"""Token deltas to text deltas: one choice of a response, as its reader takes it from the ticket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.logprobs import TokenLogprobs
from libs.packing import count_ids
from libs.text.decoding import IncrementalText
from services.gateway.tickets import Ticket
from tokenloom.scheduler.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Change:
    """What is new of one choice: tokens, the text that they release, and the ending when it has come.

    `logprobs`: one entry per token of `token_ids`; None: none were asked for. `prompt_logprobs`: one entry per token of the prompt (the
    first is undefined: NaN, rank 0), whole and once, with the choice's first tokens, of every choice of the prompt; else None.
    """

    index: int
    token_ids: list[int]
    text: str
    ending: scheduler_pb2.Ending | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


def joined(changes: Sequence[Change]) -> Change:
    """Consecutive changes of one choice as one; there is at least one."""
    first, last = changes[0], changes[-1]
    if first is last:
        return first
    listed = [change.logprobs for change in changes if change.logprobs is not None]
    return Change(
        index=last.index,
        token_ids=list(itertools.chain.from_iterable(change.token_ids for change in changes)),
        text="".join([change.text for change in changes]),
        ending=last.ending,
        logprobs=list(itertools.chain.from_iterable(listed)) if listed else None,
        prompt_logprobs=next((change.prompt_logprobs for change in changes if change.prompt_logprobs is not None), None),
    )


@dataclass(slots=True)
class Choice:
    """One choice: its ticket, its prompt (little-endian uint32) and the text held back so far.

    Deltas that piled up since the last `advance` come as one. `first`: the first choice of the same prompt, which alone asks for the
    prompt's log-probabilities; None: it is the first.
    """

    index: int
    ticket: Ticket
    prompt_ids: bytes = field(repr=False)
    text: IncrementalText
    first: Choice | None = field(default=None, repr=False)
    ended: bool = False
    prompt_shown: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it is the first choice of its prompt: the prompt and what of it was cached are counted with this one alone."""
        return self.ticket.submit.sampling.choice_index == 0

    def advance(self) -> Change | None:
        """What is new since the last call, or None. The tokens of an ending go to the text together with where it cuts."""
        ending = self.ticket.ending
        if self.ended or (ending is None and self.ticket.taken == len(self.ticket.output)):
            return None
        logprobs = self.ticket.take_logprobs()
        token_ids = self.ticket.take()
        prompt = self._take_prompt() if token_ids else None
        if ending is None:
            return Change(self.index, token_ids, self.text.push(token_ids), None, logprobs, prompt)
        self.ended = True
        keep = ending.keep_bytes if ending.HasField("keep_bytes") else None
        return Change(self.index, token_ids, self.text.finish(keep, token_ids), ending, logprobs, prompt)

    def _take_prompt(self) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities, once. They are there before any choice's first token: later ones wait for the first's prompt."""
        if self.prompt_shown:
            return None
        self.prompt_shown = True
        positions = (self.first or self).ticket.prompt_positions
        return positions.unpack() if positions is not None else None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: `cached` are those of `prompt` whose KV was in the prefix cache; None: not all first choices' endings, which
    tell it, have come.
    """

    prompt: int
    completion: int
    cached: int | None


def count_tokens(choices: Sequence[Choice]) -> TokenCounts:
    """Tokens of all choices, each prompt counted once: from the endings of those that have ended, else what has been delivered."""
    prompt = completion = cached = 0
    told = True
    for choice in choices:
        ending = choice.ticket.ending
        completion += ending.completion_tokens if ending is not None else choice.ticket.taken
        if choice.is_first:
            prompt += ending.prompt_tokens if ending is not None else count_ids(choice.prompt_ids)
            cached += ending.cached_tokens if ending is not None else 0
            told = told and ending is not None
    return TokenCounts(prompt, completion, cached if told else None)
