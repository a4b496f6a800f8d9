"""When a request stops: decided once, at the exact token, for every reason that lies in the output itself.

Order of the checks, as users of vLLM know it: end of sequence, stop token, stop string, length. Before `min_tokens` outputs only the
length counts; a stop string completed by one of those tokens is void. What stopped it is no part of the text unless
`include_stop_in_output`; special tokens spell text, which stop strings match, where `keep_special_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from libs.sampling import SamplingParams
from libs.text.decoding import OutputBytes
from libs.text.stopping import StopMatcher
from libs.text.table import TextTable


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    CONSTRAINT_COMPLETE = "constraint_complete"


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop found at a token. `keep_bytes`: raw bytes of output text that belong to the answer; None: all of them."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token: int | None = None
    keep_bytes: int | None = None


_AT_LENGTH = Stop(FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class StopRules:
    """What of the served model bears on stopping. `eos_token_ids`: the primary id first; `table`: the bytes of every id."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int
    table: TextTable


class StopTracker:
    """The stopping state of one request: a pure function of its parameters and outputs, rebuilt by replay on resumption.

    `resumed`: a mesh that could hold all of `max_tokens` has accepted it; a smaller context does not cut it short.
    """

    __slots__ = ("_eos", "_matcher", "_params", "_rules", "_stop_ids", "max_output")

    def __init__(self, rules: StopRules, params: SamplingParams, prompt_tokens: int, *, resumed: bool = False) -> None:
        self._rules = rules
        self._params = params
        # Most output tokens the request may have: its max_tokens, or what the context leaves.
        self.max_output = params.max_tokens if resumed else min(params.max_tokens, rules.max_model_len - prompt_tokens)
        eos = () if params.ignore_eos else rules.eos_token_ids
        self._eos = eos[0] if eos else None
        self._stop_ids = frozenset((*eos[1:], *params.stop_token_ids))
        skip = not params.keep_special_tokens
        self._matcher = StopMatcher(rules.table, params.stop, skip_special_tokens=skip) if params.stop else None

    def push(self, token: int, outputs: Sequence[int]) -> Stop | None:
        """Takes the next output token (already the last of `outputs`); returns the stop it brings, if any."""
        counts = len(outputs) >= self._params.min_tokens
        match = self._matcher.push(token, may_match=counts) if self._matcher else None
        if counts and token == self._eos:
            return Stop(FinishReason.STOP, keep_bytes=self._bytes_before(outputs))
        if counts and token in self._stop_ids:
            return Stop(FinishReason.STOP, stop_token=token, keep_bytes=self._bytes_before(outputs))
        if match:
            kept = len(match.stop.encode()) if self._params.include_stop_in_output else 0
            return Stop(FinishReason.STOP, stop_string=match.stop, keep_bytes=match.keep_bytes + kept)
        return _AT_LENGTH if len(outputs) >= self.max_output else None

    def complete(self, outputs: Sequence[int]) -> Stop:
        """The stop that a completed constraint brings, whatever `min_tokens` says: an end of sequence that completed it is no text."""
        ended = outputs[-1] in self._rules.eos_token_ids
        return Stop(FinishReason.CONSTRAINT_COMPLETE, keep_bytes=self._bytes_before(outputs) if ended else None)

    def _bytes_before(self, outputs: Sequence[int]) -> int | None:
        """Bytes of output text without the last token, which stopped it; None, all of them, where it is to stay."""
        if self._params.include_stop_in_output:
            return None
        return len(OutputBytes(self._rules.table, skip_special_tokens=not self._params.keep_special_tokens).push(outputs[:-1]))
