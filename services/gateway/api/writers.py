"""What the writers of chats and completions have in common: they make OpenAI's JSON of changes, whole responses and chunks of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from libs.packing import unpack_ids
from libs.text.table import TextTable
from services.gateway.api.logprobs import TokenNames, prompt_logprobs
from services.gateway.api.responses import PromptLogprobs, PromptTokensDetails, Usage
from services.gateway.endings import finish_reason
from services.gateway.streamer import Change, Choice, count_tokens
from services.gateway.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Form:
    """What a response is made from beside the changes. `created` is in Unix seconds; `choices` are all that are generated."""

    wanted: Wanted
    id: str
    created: int
    table: TextTable
    choices: Sequence[Choice]


class Writer(Protocol):
    """Writes one response, either in chunks or whole."""

    def opening(self) -> list[Struct]:
        """Chunks before the first change."""
        ...

    def chunk(self, change: Change) -> Struct | None:
        """The chunk of a change; None when it shows nothing yet."""
        ...

    def usage_chunk(self) -> Struct:
        """The last chunk, of usage alone."""
        ...

    def whole(self, changes: Sequence[Change]) -> Struct:
        """The response that is not streamed, of one change per choice that is all of it."""
        ...


class BaseWriter:
    """Usage, token ids and names of tokens."""

    def __init__(self, form: Form) -> None:
        self._form, self._shown = form, form.wanted.shown
        self._names = TokenNames(form.table, as_ids=self._shown.tokens_as_ids, keep_special=self._shown.keep_special_tokens)

    def _usage_so_far(self) -> Usage | UnsetType | None:
        """Usage as a chunk before the last one has it."""
        wanted = self._form.wanted
        if not wanted.include_usage:
            return UNSET
        return self._counted() if wanted.continuous_usage else None

    def _usage(self) -> Usage:
        """Usage at the end."""
        return self._counted()

    def _counted(self) -> Usage:
        """Tokens of all that was generated, shown or not. The one token that stands in for none (echo alone) is not the client's."""
        count = count_tokens(self._form.choices)
        completion = 0 if self._shown.echo_only else count.completion
        details = UNSET if count.cached is None else PromptTokensDetails(count.cached)
        return Usage(count.prompt, completion, count.prompt + completion, details)

    def _token_ids(self, change: Change) -> list[int] | UnsetType:
        return change.token_ids if self._shown.return_token_ids else UNSET

    def _shows_tokens(self, change: Change) -> bool:
        """Whether a change is worth a chunk although it releases no text."""
        return bool(change.ending is not None or (change.token_ids and (self._shown.return_token_ids or self._shown.logprobs is not None)))

    def _prompt_ids(self, choice: Choice) -> list[int] | UnsetType:
        return unpack_ids(choice.prompt_ids) if self._shown.return_token_ids else UNSET

    def _prompt_logprobs(self, change: Change) -> PromptLogprobs | UnsetType:
        asked = self._shown.prompt_logprobs
        return UNSET if asked is None or change.prompt_logprobs is None else prompt_logprobs(self._names, change.prompt_logprobs, asked)


def finish_of(change: Change) -> str | None:
    """OpenAI's name of how a choice ended; None while it goes on, and for a failure, which is told as an error."""
    return None if change.ending is None else finish_reason(change.ending)
