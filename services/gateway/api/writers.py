"""How changes become OpenAI's JSON: one writer for chats, one for completions; whole responses and chunks of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from libs.packing import unpack_ids
from services.gateway.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    Delta,
    PromptTokensDetails,
    Usage,
)
from services.gateway.endings import finish_reason, stop_reason
from services.gateway.streamer import Change, Choice, count_tokens
from services.gateway.wanted import Wanted


@dataclass(slots=True)
class Finished:
    """A choice of a response that is not streamed: all its text and tokens, and its last change."""

    choice: Choice
    text: str
    token_ids: list[int]
    last: Change


class Writer(Protocol):
    """Writes one response. `created` is in Unix seconds."""

    def opening(self, choices: Sequence[Choice]) -> list[Struct]:
        """Chunks before the first change."""
        ...

    def chunk(self, change: Change, choices: Sequence[Choice]) -> Struct | None:
        """The chunk of a change; None when it shows nothing yet."""
        ...

    def usage_chunk(self, choices: Sequence[Choice]) -> Struct:
        """The last chunk, of usage alone."""
        ...

    def whole(self, finished: Sequence[Finished]) -> Struct:
        """The response that is not streamed."""
        ...


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Tokens of all choices as the API counts them."""
    count = count_tokens(choices)
    return Usage(count.prompt, count.completion, count.prompt + count.completion, PromptTokensDetails(count.cached))


class _Base:
    def __init__(self, wanted: Wanted, response_id: str, created: int) -> None:
        self._wanted, self._id, self._created = wanted, response_id, created

    def _usage(self, choices: Sequence[Choice]) -> Usage | UnsetType | None:
        if not self._wanted.include_usage:
            return UNSET
        return usage_of(choices) if self._wanted.continuous_usage else None

    def _token_ids(self, change: Change) -> list[int] | UnsetType:
        return change.token_ids if self._wanted.shown.return_token_ids else UNSET

    def _shows(self, change: Change) -> bool:
        return bool(change.text or change.ending is not None or (self._wanted.shown.return_token_ids and change.token_ids))

    def _prompt_ids(self, choice: Choice) -> list[int] | UnsetType:
        return unpack_ids(choice.prompt_ids) if self._wanted.shown.return_token_ids else UNSET


class ChatWriter(_Base):
    """chat.completion and chat.completion.chunk."""

    def opening(self, choices: Sequence[Choice]) -> list[Struct]:
        """The role of each choice, before any content; a chunk of its own for each, because many readers look at the first choice only."""
        chunks = [self._chunk([ChatChunkChoice(choice.index, Delta(role="assistant", content=""))], choices) for choice in choices]
        chunks[0].prompt_token_ids = self._prompt_ids(choices[0])
        return list[Struct](chunks)

    def chunk(self, change: Change, choices: Sequence[Choice]) -> Struct | None:
        """See Writer."""
        if not self._shows(change):
            return None
        choice = ChatChunkChoice(change.index, Delta(content=change.text) if change.text else Delta(), token_ids=self._token_ids(change))
        if change.ending is not None:
            choice.finish_reason, choice.stop_reason = finish_reason(change.ending), stop_reason(change.ending)
        return self._chunk([choice], choices)

    def usage_chunk(self, choices: Sequence[Choice]) -> Struct:
        """See Writer."""
        chunk = self._chunk([], choices)
        chunk.usage = usage_of(choices)
        return chunk

    def _chunk(self, parts: list[ChatChunkChoice], choices: Sequence[Choice]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._wanted.model, choices=parts, usage=self._usage(choices))

    def whole(self, finished: Sequence[Finished]) -> Struct:
        """See Writer."""
        parts = [
            ChatChoice(
                item.choice.index,
                ChatMessage(content=item.text),
                _finish_of(item.last),
                _stop_of(item.last),
                token_ids=item.token_ids if self._wanted.shown.return_token_ids else UNSET,
            )
            for item in finished
        ]
        usage = usage_of([item.choice for item in finished])
        prompt_ids = self._prompt_ids(finished[0].choice)
        return ChatCompletion(
            id=self._id, created=self._created, model=self._wanted.model, choices=parts, usage=usage, prompt_token_ids=prompt_ids
        )


class CompletionWriter(_Base):
    """text_completion, whole and in chunks."""

    def __init__(self, wanted: Wanted, response_id: str, created: int) -> None:
        super().__init__(wanted, response_id, created)
        self._begun: set[int] = set()

    def opening(self, choices: Sequence[Choice]) -> list[Struct]:
        """Nothing: a completion has no role."""
        return []

    def chunk(self, change: Change, choices: Sequence[Choice]) -> Struct | None:
        """See Writer."""
        if not self._shows(change):
            return None
        part = CompletionChoice(change.index, change.text, token_ids=self._token_ids(change))
        if change.index not in self._begun:
            self._begun.add(change.index)
            part.prompt_token_ids = self._prompt_ids(choices[change.index])
        if change.ending is not None:
            part.finish_reason, part.stop_reason = finish_reason(change.ending), stop_reason(change.ending)
        return self._completion([part], self._usage(choices))

    def usage_chunk(self, choices: Sequence[Choice]) -> Struct:
        """See Writer."""
        return self._completion([], usage_of(choices))

    def whole(self, finished: Sequence[Finished]) -> Struct:
        """See Writer."""
        parts = [
            CompletionChoice(
                item.choice.index,
                item.text,
                finish_reason=_finish_of(item.last),
                stop_reason=_stop_of(item.last),
                token_ids=item.token_ids if self._wanted.shown.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_ids(item.choice),
            )
            for item in finished
        ]
        return self._completion(parts, usage_of([item.choice for item in finished]))

    def _completion(self, parts: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._wanted.model, choices=parts, usage=usage)


def _finish_of(change: Change) -> str:
    assert change.ending is not None, "a finished choice has its ending"
    return finish_reason(change.ending) or "stop"


def _stop_of(change: Change) -> str | int | None:
    assert change.ending is not None, "a finished choice has its ending"
    return stop_reason(change.ending)
