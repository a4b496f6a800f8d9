"""What a slot remembers for the logits processors of its request: a pure function of (parameters, prompt ids, output ids).

It is built at the slot's opening by replay and advanced by one token where a step is committed, so that a step that fails leaves it as it
was. Requests that ask for no processor have none, and cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.sampling import SamplingParams
from services.worker.sampling.custom import CustomProcessor, Joined, join_request
from services.worker.sampling.rows import (
    NO_FLOATS,
    NO_INTEGERS,
    Bias,
    CustomRow,
    Edits,
    Floats,
    Ids,
    Integers,
    Penalized,
    points_of,
    within,
)


class TokenCounts:
    """Distinct ids of a sequence and how often its output holds each; a token more costs a look at the distinct ones."""

    __slots__ = ("_counts", "_ids", "_size")

    def __init__(self, prompt_ids: Ids, output_ids: Ids) -> None:
        """`prompt_ids` are listed with a count of 0; leave them out where only the output matters."""
        ids, places = np.unique(np.concatenate([prompt_ids, output_ids]), return_inverse=True)
        counts = np.bincount(places[prompt_ids.size :], minlength=ids.size)
        self._ids, self._counts, self._size = ids.astype(np.int64), counts.astype(np.float32), ids.size

    @property
    def ids(self) -> Integers:
        """int64[N], each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Floats:
        """float32[N], parallel to `ids`."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """One more token of output."""
        place = np.flatnonzero(self.ids == token)
        if place.size:
            self._counts[place] += 1
            return
        if self._size == self._ids.size:
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[self._size], self._counts[self._size] = token, 1
        self._size += 1


class BadWords:
    """Sequences that an output must not contain, found by the ids before their last one."""

    __slots__ = ("_by_prefix", "_lengths")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Each of `words` has at least one id."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for word in words:
            found[tuple(word[:-1])].append(word[-1])
        self._by_prefix = {prefix: np.unique(np.asarray(last, np.int64)) for prefix, last in found.items()}
        self._lengths = sorted({len(prefix) for prefix in found})

    def banned(self, output_ids: Ids) -> Integers:
        """Ids that would complete a word after `output_ids`; one may stand here twice."""
        within = [length for length in self._lengths if length <= output_ids.size]
        tails = (tuple(output_ids[output_ids.size - length :].tolist()) for length in within)
        found = [self._by_prefix[tail] for tail in tails if tail in self._by_prefix]
        return np.concatenate(found) if found else NO_INTEGERS


@dataclass(frozen=True, slots=True)
class Steering:
    """One request's share of the processors. `allowed`: None, where all ids are."""

    sampling: SamplingParams
    allowed: Integers | None
    biased: Integers
    bias: Floats
    counts: TokenCounts | None
    bad_words: BadWords | None
    custom: tuple[Joined, ...]

    def advance(self, token: int) -> None:
        """A step is committed: the output has one token more."""
        if self.counts is not None:
            self.counts.add(token)

    @property
    def refuses_args(self) -> bool:
        """Whether a processor began with a ValueError: the request's arguments are at fault, not the processor."""
        return any(isinstance(item.process, ValueError) for item in self.custom)


def steer(sampling: SamplingParams, prompt_ids: Ids, output_ids: Ids, custom: Sequence[CustomProcessor] = ()) -> Steering | None:
    """What a request with these parameters and ids asks of the processors; None: nothing. `custom`: the operator's, in their order."""
    repeated = sampling.repetition_penalty != 1
    penalized = repeated or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    joined = join_request(custom, sampling)
    if not (penalized or joined or sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids):
        return None
    return Steering(
        sampling=sampling,
        allowed=np.unique(np.asarray(sampling.allowed_token_ids, np.int64)) if sampling.allowed_token_ids else None,
        biased=np.asarray([token for token, _ in sampling.logit_bias], np.int64),
        bias=np.asarray([value for _, value in sampling.logit_bias], np.float32),
        counts=TokenCounts(prompt_ids if repeated else prompt_ids[:0], output_ids) if penalized else None,
        bad_words=BadWords(sampling.bad_words) if sampling.bad_words else None,
        custom=joined,
    )


@dataclass(frozen=True, slots=True)
class SteeredRow:
    """A sampled row that asks for processors, and the ids of its sequence."""

    row: int
    request: str
    steering: Steering
    prompt_ids: Ids
    output_ids: Ids


def edits_of(rows: Sequence[SteeredRow], vocab_size: int) -> Edits:
    """What the rows ask for in this step beyond filters and bans; ids outside the vocabulary are left out."""
    allowed = [(item.row, item.steering.allowed) for item in rows if item.steering.allowed is not None]
    points, kept = within(points_of([(item.row, item.steering.biased) for item in rows]), vocab_size)
    return Edits(
        allowed_rows=np.asarray([row for row, _ in allowed], np.int64),
        allowed=within(points_of(allowed), vocab_size)[0],
        bias=Bias(points, _joined([item.steering.bias for item in rows])[kept]),
        penalized=_penalized(rows, vocab_size),
        custom=tuple(
            CustomRow(item.row, item.request, joined.name, joined.process, item.prompt_ids, item.output_ids)
            for item in rows
            for joined in item.steering.custom
        ),
    )


def _penalized(rows: Sequence[SteeredRow], vocab_size: int) -> Penalized:
    counted = [(item.row, item.steering.sampling, item.steering.counts) for item in rows if item.steering.counts is not None]
    points, kept = within(points_of([(row, counts.ids) for row, _, counts in counted]), vocab_size)
    sizes = [counts.ids.size for _, _, counts in counted]

    def spread(values: list[float]) -> Floats:
        return np.repeat(np.asarray(values, np.float32), sizes)[kept]

    return Penalized(
        points=points,
        counts=_joined([counts.counts for _, _, counts in counted])[kept],
        repetition=spread([sampling.repetition_penalty for _, sampling, _ in counted]),
        frequency=spread([sampling.frequency_penalty for _, sampling, _ in counted]),
        presence=spread([sampling.presence_penalty for _, sampling, _ in counted]),
    )


def _joined(values: Sequence[Floats]) -> Floats:
    return np.concatenate(values) if values else NO_FLOATS
