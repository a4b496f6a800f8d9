"""chat.completion and chat.completion.chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from libs.text.decoding import OutputBytes
from services.gateway.api.logprobs import chat_logprobs
from services.gateway.api.messages import MessageReader, count_until
from services.gateway.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionTokensDetails,
    Delta,
    Usage,
)
from services.gateway.api.writers import BaseWriter, Form, finish_of
from services.gateway.endings import stop_reason
from services.gateway.parsers.base import Part
from services.gateway.streamer import Change

_NOTHING = Delta()


class ChatWriter(BaseWriter):
    """See Writer. Choices are read by one `new_reader()` each. `reasoning_end`: the text that ends reasoning, None where none is told
    apart; what stands before it counts as `reasoning_tokens`, its own included.
    """

    def __init__(self, form: Form, new_reader: Callable[[], MessageReader], reasoning_end: str | None = None) -> None:
        super().__init__(form)
        self._reasoning_end = reasoning_end
        self._readers = [new_reader() for _ in form.choices]
        self._outputs: list[OutputBytes] = [self._names.output() for _ in form.choices]

    def opening(self) -> list[Struct]:
        """The role of each choice, before any content; a chunk of its own for each, because many readers look at the first choice only."""
        choices = self._form.choices
        chunks = [self._chunk([ChatChunkChoice(choice.index, Delta(role="assistant", content=""))]) for choice in choices]
        chunks[0].prompt_token_ids = self._prompt_ids(choices[0])
        return list[Struct](chunks)

    def chunk(self, change: Change) -> Struct | None:
        """See Writer."""
        delta = self._readers[change.index].delta(self._parts(change))
        if delta == _NOTHING and not self._shows_tokens(change):
            return None
        choice = ChatChunkChoice(change.index, delta, self._logprobs(change), token_ids=self._token_ids(change))
        if change.ending is not None:
            choice.finish_reason, choice.stop_reason = self._finish(change), stop_reason(change.ending)
        return self._chunk([choice])

    def usage_chunk(self) -> Struct:
        """See Writer."""
        chunk = self._chunk([])
        chunk.usage = self._usage()
        return chunk

    def _chunk(self, parts: list[ChatChunkChoice]) -> ChatChunk:
        form = self._form
        return ChatChunk(id=form.id, created=form.created, model=form.wanted.model, choices=parts, usage=self._usage_so_far())

    def whole(self, changes: Sequence[Change]) -> Struct:
        """See Writer."""
        form = self._form
        return ChatCompletion(
            id=form.id,
            created=form.created,
            model=form.wanted.model,
            choices=[self._choice(change) for change in changes],
            usage=self._usage(),
            prompt_token_ids=self._prompt_ids(form.choices[0]),
            prompt_logprobs=self._prompt_logprobs(changes[0]),
        )

    def _choice(self, change: Change) -> ChatChoice:
        assert change.ending is not None, "a whole choice has its ending"
        return ChatChoice(
            change.index,
            self._readers[change.index].message(self._parts(change)),
            self._finish(change) or "stop",
            stop_reason(change.ending),
            self._logprobs(change),
            self._token_ids(change),
        )

    def _usage(self) -> Usage:
        usage, end = super()._usage(), self._reasoning_end
        if end is not None:
            pairs = zip(self._form.choices, self._readers, strict=True)
            counts = [count_until(self._form.table, choice.ticket.output, end) for choice, reader in pairs if reader.reasoned]
            usage.completion_tokens_details = CompletionTokensDetails(sum(counts))
        return usage

    def _parts(self, change: Change) -> list[Part]:
        return self._readers[change.index].parts(change)

    def _finish(self, change: Change) -> str | None:
        """Where the model came to its end with calls that can be made, these are why it ended; where it was cut off, or has written what
        is no call to its end, it is the ending's own reason.
        """
        reason = finish_of(change)
        return "tool_calls" if reason == "stop" and self._readers[change.index].calls.complete else reason

    def _logprobs(self, change: Change) -> ChatLogprobs | None:
        if self._shown.logprobs is None or not change.logprobs:
            return None
        return chat_logprobs(self._names, self._outputs[change.index], change.logprobs, self._shown.logprobs)
