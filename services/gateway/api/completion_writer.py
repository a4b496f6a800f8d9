"""text_completion, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, UnsetType

from libs.logprobs import TokenLogprobs
from libs.packing import unpack_ids
from libs.text.decoding import decode_text
from services.gateway.api.logprobs import TextOffsets, completion_logprobs, mean_logprob
from services.gateway.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from services.gateway.api.writers import BaseWriter, Form, finish_of
from services.gateway.endings import stop_reason
from services.gateway.streamer import Change, Choice


class CompletionWriter(BaseWriter):
    """See Writer."""

    def __init__(self, form: Form) -> None:
        super().__init__(form)
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self) -> list[Struct]:
        """Nothing: a completion has no role."""
        return []

    def chunk(self, change: Change) -> Struct | None:
        """See Writer."""
        part = self._part(change)
        return self._completion([part], self._usage_so_far()) if part.text or self._shows_tokens(change) else None

    def usage_chunk(self) -> Struct:
        """See Writer."""
        return self._completion([], self._usage())

    def whole(self, changes: Sequence[Change]) -> Struct:
        """See Writer. Of each prompt's choices the likeliest are shown, where more were generated than asked for."""
        parts = [self._part(change) for change in self._best(changes)]
        for index, part in enumerate(parts):
            part.index = index
        return self._completion(parts, self._usage())

    def _best(self, changes: Sequence[Change]) -> list[Change]:
        wanted = self._form.wanted
        if wanted.generated == wanted.n:
            return list(changes)
        found: list[Change] = []
        for start in range(0, len(changes), wanted.generated):
            ranked = sorted(changes[start : start + wanted.generated], key=lambda change: mean_logprob(change.logprobs or ()), reverse=True)
            found += ranked[: wanted.n]
        return found

    def _part(self, change: Change) -> CompletionChoice:
        """A change as a part of its choice. The first one of a choice that echoes its prompt begins with it."""
        choice = self._form.choices[change.index]
        first = change.index not in self._offsets
        prompt = self._echo(choice) if first and self._shown.echo else ""
        if first:
            self._offsets[change.index] = self._names.offsets(len(prompt))
        part = CompletionChoice(change.index, prompt if self._shown.echo_only else prompt + change.text)
        part.logprobs = self._logprobs(change, prompt)
        part.token_ids = self._token_ids(change)
        if first:
            part.prompt_token_ids = self._prompt_ids(choice)
        part.prompt_logprobs = self._prompt_logprobs(change)
        if change.ending is not None:
            part.finish_reason, part.stop_reason = finish_of(change), stop_reason(change.ending)
            if self._shown.echo_only and part.finish_reason is not None:
                part.finish_reason, part.stop_reason = "length", None
        return part

    def _token_ids(self, change: Change) -> list[int] | UnsetType:
        if self._shown.echo_only and self._shown.return_token_ids:
            return []
        return super()._token_ids(change)

    def _echo(self, choice: Choice) -> str:
        """The prompt as its client wrote it: what the tokenizer put before it is not the client's. What ids spell, where it came as ids, or
        where its beginning was cut off.
        """
        spelled = self._spelled(choice)
        request = self._form.wanted.prompts[choice.index // self._form.wanted.generated].request
        return request.text if request.HasField("text") and spelled.endswith(request.text) else spelled

    def _spelled(self, choice: Choice) -> str:
        return decode_text(self._form.table, unpack_ids(choice.prompt_ids), skip_special_tokens=False)

    def _logprobs(self, change: Change, prompt: str) -> CompletionLogprobs | None:
        """Those of the change's tokens, behind those of the prompt where the text begins with it."""
        alternatives = self._shown.logprobs
        if alternatives is None:
            return None
        tokens: list[TokenLogprobs] = []
        offsets: list[int] = []
        if self._shown.echo and change.prompt_logprobs is not None:
            tokens += change.prompt_logprobs
            offsets += self._prompt_offsets(self._form.choices[change.index], prompt)
        if change.logprobs is not None and not self._shown.echo_only:
            tokens += change.logprobs
            counter = self._offsets[change.index]
            offsets += [counter.next(token.token_id) for token in change.logprobs]
        return completion_logprobs(self._names, tokens, offsets, alternatives) if tokens else None

    def _prompt_offsets(self, choice: Choice, prompt: str) -> list[int]:
        """Where the prompt's tokens begin in the echoed text; what stands before it there begins with it."""
        lead = len(self._spelled(choice)) - len(prompt)
        counter = TextOffsets(self._form.table, keep_special=True)
        return [max(counter.next(token_id) - lead, 0) for token_id in unpack_ids(choice.prompt_ids)]

    def _completion(self, parts: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        form = self._form
        return Completion(id=form.id, created=form.created, model=form.wanted.model, choices=parts, usage=usage)
