"""Log-probabilities in OpenAI's and vLLM's shapes.

All sampled tokens are listed, those too that a stop cuts from the text: their number is `completion_tokens`, as in vLLM. A token that is
not UTF-8 by itself (part of a character) is spelled with `\\xf0` escapes, as OpenAI's API does, so that two of them stay two names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from libs.logprobs import TokenLogprobs
from libs.text.decoding import IncrementalText, OutputBytes
from libs.text.table import TextTable, TokenClass
from services.gateway.api.responses import (
    Alternative,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

# What JSON, which has no infinities, says for a token that cannot come; vLLM's number.
MIN_LOGPROB = -9999.0


class TokenNames:
    """How a response spells tokens. `as_ids`: "token_id:17"; `keep_special`: special tokens are part of the text."""

    __slots__ = ("_as_ids", "_data", "_keep_special", "_names", "_table")

    def __init__(self, table: TextTable, *, as_ids: bool = False, keep_special: bool = False) -> None:
        self._table, self._as_ids, self._keep_special = table, as_ids, keep_special
        # The same few tokens are the likeliest again and again.
        self._names: dict[int, str] = {}
        self._data: dict[int, list[int]] = {}

    def name(self, token_id: int) -> str:
        """A token by itself; special ones too have their name."""
        found = self._names.get(token_id)
        if found is None:
            found = self._names[token_id] = f"token_id:{token_id}" if self._as_ids else self.decoded(token_id)
        return found

    def decoded(self, token_id: int) -> str:
        """The same, always spelled."""
        return self._table.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def data(self, token_id: int) -> list[int]:
        """The bytes that it adds to a text; none for a special token that is skipped."""
        found = self._data.get(token_id)
        if found is None:
            skipped = not self._keep_special and self._table.token_class(token_id) is TokenClass.SPECIAL
            found = self._data[token_id] = [] if skipped else list(self._table.token_bytes(token_id))
        return found

    def output(self) -> OutputBytes:
        """Gives the bytes of one choice's tokens in order, which join to its text: where the first one's space is dropped, they know."""
        return OutputBytes(self._table, skip_special_tokens=not self._keep_special)

    def offsets(self, start: int) -> TextOffsets:
        """Counts the output's characters from `start` on."""
        return TextOffsets(self._table, start, keep_special=self._keep_special)


class TextOffsets:
    """Where tokens begin in a text, in characters. Tokens that share a character begin where it does."""

    __slots__ = ("_at", "_text")

    def __init__(self, table: TextTable, start: int = 0, *, keep_special: bool = False) -> None:
        self._text, self._at = IncrementalText(table, skip_special_tokens=not keep_special), start

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._text.push((token_id,)))
        return at


def chat_logprobs(names: TokenNames, output: OutputBytes, tokens: Iterable[TokenLogprobs], alternatives: int) -> ChatLogprobs:
    """`content` of a chat's choice: each token with its `alternatives` most likely ones. `output` has had the tokens before."""
    return ChatLogprobs([_chat_token(names, output, token, alternatives) for token in tokens])


def completion_logprobs(
    names: TokenNames, tokens: Sequence[TokenLogprobs], offsets: Sequence[int], alternatives: int
) -> CompletionLogprobs:
    """The columns of a completion's choice. The token itself is always among the alternatives, of which there may be one more then."""
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[_finite(token.logprob) for token in tokens],
        tokens=[names.name(token.token_id) for token in tokens],
        top_logprobs=[_by_name(names, token, alternatives) for token in tokens],
    )


def prompt_logprobs(names: TokenNames, tokens: Sequence[TokenLogprobs], alternatives: int) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: each position's token and the `alternatives` most likely ones, by id."""
    return [_by_id(names, token, alternatives) for token in tokens]


def mean_logprob(tokens: Sequence[TokenLogprobs]) -> float:
    """Of a whole output, per token; what best_of chooses by. An empty output is as likely as can be."""
    return math.fsum(max(token.logprob, MIN_LOGPROB) for token in tokens) / len(tokens) if tokens else 0.0


def _chat_token(names: TokenNames, output: OutputBytes, token: TokenLogprobs, alternatives: int) -> TokenLogprob:
    top = [
        Alternative(names.name(token_id), max(value, MIN_LOGPROB), names.data(token_id))
        for token_id, value in zip(token.top_ids[:alternatives], token.top_logprobs, strict=False)
    ]
    data = list(output.push_one(token.token_id))
    return TokenLogprob(names.name(token.token_id), max(token.logprob, MIN_LOGPROB), data, top)


def _by_name(names: TokenNames, token: TokenLogprobs, alternatives: int) -> dict[str, float] | None:
    if math.isnan(token.logprob):
        return None
    found = {names.name(token.token_id): max(token.logprob, MIN_LOGPROB)}
    for token_id, value in zip(token.top_ids[:alternatives], token.top_logprobs, strict=False):
        # Two ids may have one name (an added token that spells what another does): the likelier one has it.
        found.setdefault(names.name(token_id), max(value, MIN_LOGPROB))
    return found


def _by_id(names: TokenNames, token: TokenLogprobs, alternatives: int) -> dict[int, PromptLogprob] | None:
    if math.isnan(token.logprob):
        return None
    found = {token.token_id: PromptLogprob(max(token.logprob, MIN_LOGPROB), token.rank, names.decoded(token.token_id))}
    for rank, (token_id, value) in enumerate(zip(token.top_ids[:alternatives], token.top_logprobs, strict=False), 1):
        found.setdefault(token_id, PromptLogprob(max(value, MIN_LOGPROB), rank, names.decoded(token_id)))
    return found


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
