"""One request's life as the gateway sees it: admit, encode, submit, read; and its end, whoever asks for it.

prepare:  admit -> encode          an interruption raises at once; nothing has been handed over
submit:   one ticket per choice    from here the tickets' endings end it, the interruption's too
changes:  tokens -> text, until every choice has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.packing import count_ids, unpack_ids
from libs.sampling import SamplingParams
from libs.text.decoding import IncrementalText
from libs.text.table import TextTable
from services.gateway.admission import Lease
from services.gateway.endings import error_of_cancel, error_of_ending
from services.gateway.mesh import Mesh
from services.gateway.parsers.planning import attribute
from services.gateway.quota import Visit
from services.gateway.record import RequestRecord, sampling_attributes
from services.gateway.streamer import Change, Choice, count_tokens
from services.gateway.terms import check_served, constraint_of, keep_last, keeps_special_tokens
from services.gateway.tickets import CancelReason, Ticket
from services.gateway.wanted import Prompt, Wanted
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2

# Prompts of one request that are encoded at a time: one request must not fill the tokenizers' queues.
ENCODE_CONCURRENCY = 8
# Seconds that an interrupted request waits for the scheduler's word on how it ended before its client gets the answer anyway,
ENDING_PATIENCE = 5.0
# and that its accounting waits for it.
TOMBSTONE_PATIENCE = 60.0

_random = random.SystemRandom()
_T = TypeVar("_T")


class Generation:
    """All choices of one HTTP request. `close` must be awaited whatever happens; it leaves nothing running at the scheduler."""

    def __init__(self, mesh: Mesh, wanted: Wanted, record: RequestRecord, visit: Visit | None = None) -> None:
        """`visit`: the stored key that it came with, which it is charged to."""
        self._mesh, self._wanted, self._record, self._visit = mesh, wanted, record, visit
        self._bell = asyncio.Event()
        self._interrupted: asyncio.Future[CancelReason.ValueType] = asyncio.get_running_loop().create_future()
        self._gave_up = False
        self._failure: TokenloomError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._leases: list[Lease] = []
        self._encoded: list[tokenizer_pb2.EncodeResponse] = []
        self._deadline_ns = self._start_deadline()
        self.choices: list[Choice] = record.choices
        mesh.opened(self)

    def _start_deadline(self) -> int | None:
        limit, asked = self._mesh.config.request_timeout or None, self._wanted.timeout
        timeout = limit if asked is None else min(asked, limit or asked)
        if timeout is None:
            return None
        spent = (self._mesh.clock.monotonic_ns() - self._record.started_mono) / 1e9
        self._later(timeout - spent, lambda: self.interrupt(CancelReason.CANCEL_REASON_TIMEOUT))
        return self._record.started_mono + round(timeout * 1e9)

    def _later(self, seconds: float, action: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, action))

    def interrupt(self, reason: CancelReason.ValueType) -> None:
        """Asks for the end, from wherever: the first reason counts. Never blocks."""
        if self._interrupted.done():
            return
        self._interrupted.set_result(reason)
        for choice in self.choices:
            self._mesh.session.cancel(choice.ticket, reason)
        self._later(ENDING_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True
        self._bell.set()

    async def prepare(self) -> None:
        """Waits until the mesh can take the request, admits it and encodes its prompts.

        Raises TokenloomError: that it cannot, what this mesh does not serve, over the window, what the tokenizer refuses, a context that is
        too small, an interruption.
        """
        if (obstacle := self._mesh.obstacle()) is not None:
            await self._unless_interrupted(self._mesh.waiting_room.enter(obstacle))
        facts = self._facts()
        check_served(self._wanted, facts)
        self._refuse_unsafe_stops()
        self._refuse_more_than_may_live(facts.max_live_sequences, len(self._wanted.prompts) * self._wanted.generated, "sequences")
        expected = self._wanted.sampling.max_tokens or facts.defaults.max_new_tokens or facts.max_model_len
        sizes = [min(prompt.estimate + expected, facts.max_model_len) for prompt in self._wanted.prompts]
        estimates = [size for size in sizes for _ in range(self._wanted.generated)]
        self._leases = self._mesh.admission.admit(self._mesh.session.window, estimates)
        if self._visit is not None:
            await self._unless_interrupted(self._visit.admit(self._chargeable(estimates)))
        self._record.parsed_ns = self._mesh.clock.unix_ns()
        self._encoded = await self._unless_interrupted(self._encode_all(facts))
        self._record.tokenized_ns = self._mesh.clock.unix_ns()

    def _chargeable(self, estimates: list[int]) -> int:
        """Tokens that a key's limit is charged before they are known. A client that names no max_tokens is not charged the whole context
        that it might fill, or small limits would let one such request run at a time: what it does fill is charged at its end.
        """
        if self._wanted.sampling.max_tokens is not None:
            return sum(estimates)
        return sum(prompt.estimate for prompt in self._wanted.prompts)

    def _facts(self) -> scheduler_pb2.ModelFacts:
        facts = self._mesh.session.facts
        if facts is None:
            raise TokenloomError(ErrorCode.NO_WORKER, "The server does not know its model yet", retry_after_ms=1000)
        return facts

    def _refuse_more_than_may_live(self, bound: int, wanted: int, what: str) -> None:
        """All sequences of a request are live together: where the scheduler's `bound` (0: none) is less than that, no waiting helps."""
        if bound and wanted > bound:
            several = "n" if self._wanted.n > 1 else "best_of"
            param = several if self._wanted.generated > 1 else "prompt"
            message = f"the prompts and choices of this request are {wanted} {what}, and the server lets {bound} be live at once"
            raise TokenloomError(ErrorCode.CANNOT_FIT, message, param=param)

    def _refuse_unsafe_stops(self) -> None:
        table = self._mesh.tokenizers.table
        if self._wanted.sampling.stop and table is not None and not table.verified:
            raise TokenloomError(
                ErrorCode.UNSUPPORTED,
                "stop strings are not supported with this model: its tokens' text could not be verified",
                param="stop",
            )

    async def _unless_interrupted(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._interrupted}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._interrupted.done():
                raise error_of_cancel(self._interrupted.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            elif not task.cancelled():
                task.exception()

    async def _encode_all(self, facts: scheduler_pb2.ModelFacts) -> list[tokenizer_pb2.EncodeResponse]:
        slots = asyncio.Semaphore(ENCODE_CONCURRENCY)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._encode(prompt, facts, slots)) for prompt in self._wanted.prompts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _encode(self, prompt: Prompt, facts: scheduler_pb2.ModelFacts, slots: asyncio.Semaphore) -> tokenizer_pb2.EncodeResponse:
        prompt.request.max_tokens, prompt.request.keep_last = facts.max_model_len, keep_last(self._wanted, facts)
        async with slots:
            try:
                return await self._mesh.tokenizers.encode(
                    prompt.request, timeout=self._remaining(), trace=self._record.context.child(self._record.tokenize_span)
                )
            except TokenloomError as error:
                # The tokenizer knows one prompt, not which of several it is.
                if error.param in (None, "prompt") and error.code.spec.http_status == 400:
                    error.param = prompt.param
                raise

    def _remaining(self) -> float | None:
        return None if self._deadline_ns is None else max((self._deadline_ns - self._mesh.clock.monotonic_ns()) / 1e9, 0.001)

    def submit(self) -> None:
        """Hands every choice over. Raises TokenloomError when a prompt does not fit into the context; then nothing has been."""
        facts, table = self._facts(), self.table
        wanted = facts.fingerprints.tokenizer
        if wanted and any(encoded.tokenizer_fingerprint != wanted for encoded in self._encoded):
            raise TokenloomError(ErrorCode.UNAVAILABLE, "the model was exchanged while this request was encoded", retry_after_ms=1000)
        drawn = [_random.getrandbits(64) for _ in self._encoded]
        bad_words = tuple(tuple(unpack_ids(word)) for encoded in self._encoded for word in encoded.bad_words)
        keep_special = keeps_special_tokens(self._wanted, self._mesh.tokenizers)
        resolved = [
            self._wanted.sampling.resolve(
                facts,
                count_ids(encoded.token_ids),
                seed,
                prompt_param=prompt.param,
                bad_words=bad_words,
                keep_special_tokens=keep_special,
            )
            for prompt, encoded, seed in zip(self._wanted.prompts, self._encoded, drawn, strict=True)
        ]
        if len(self._leases) > 1:  # a lone sequence may exceed the bound: else it could never be served
            sizes = (count_ids(encoded.token_ids) + one.max_tokens for encoded, one in zip(self._encoded, resolved, strict=True))
            self._refuse_more_than_may_live(facts.max_live_tokens, sum(sizes) * self._wanted.generated, "tokens")
        self._record.sampling = sampling_attributes(resolved[0], self._wanted.constraint)
        constraints = [constraint_of(self._wanted, encoded.token_ids, self._mesh.tokenizers) for encoded in self._encoded]
        for encoded, sampling, constraint in zip(self._encoded, resolved, constraints, strict=True):
            self._submit_choices(encoded, sampling, table, constraint)
            self._mesh.traffic.prompt_tokens += count_ids(encoded.token_ids)

    def _submit_choices(
        self, encoded: tokenizer_pb2.EncodeResponse, sampling: SamplingParams, table: TextTable, constraint: Constraint | None
    ) -> None:
        """One submit per choice of a prompt. The later ones name the first, whose prompt they share; their draws differ by the choice.

        The prompt's log-probabilities are asked for once, with the first: the others read its blocks.
        """
        parent_id = 0
        first: Choice | None = None
        for choice_index in range(self._wanted.generated):
            index = len(self.choices)
            lease = self._leases[index]
            lease.settle(count_ids(encoded.token_ids) + sampling.max_tokens)
            own = replace(sampling, choice_index=choice_index, prompt_logprobs=None if parent_id else sampling.prompt_logprobs)
            ticket = self._ticket(encoded, own.to_proto(), constraint, lease, parent_id)
            choice = Choice(index, ticket, encoded.token_ids, _text_of(sampling, table), first)
            first = first or choice
            self.choices.append(choice)
            self._mesh.session.submit(ticket)
            parent_id = parent_id or ticket.id

    def _ticket(
        self,
        encoded: tokenizer_pb2.EncodeResponse,
        sampling: common_pb2.SamplingParams,
        constraint: Constraint | None,
        lease: Lease,
        parent_id: int,
    ) -> Ticket:
        context = self._record.context
        submit = scheduler_pb2.Submit(
            id=self._mesh.book.next_id(),
            prompt_ids=encoded.token_ids,
            block_hashes=encoded.block_hashes,
            sampling=sampling,
            trace=common_pb2.TraceContext(traceparent=str(context), tracestate=context.state),
            label=self._record.request_id,
            priority=self._wanted.priority,
            choices=1,
            parent_id=parent_id,
        )
        if constraint is not None:
            submit.constraint.CopyFrom(constraint.to_proto())
        self._record.internal_ids.append(f"{self._mesh.session.instance:x}:{submit.id}")
        return Ticket(submit, self._bell, deadline_ns=self._deadline_ns, on_ended=lease.release)

    @property
    def begun(self) -> bool:
        """Whether it was admitted: before that nothing has happened that a second try elsewhere would do twice."""
        return bool(self._leases)

    @property
    def table(self) -> TextTable:
        """What tokens spell. Raises TokenloomError while no tokenizer has told it."""
        table = self._mesh.tokenizers.table
        if table is None:
            raise TokenloomError(ErrorCode.TOKENIZER_UNAVAILABLE, "no tokenizer has answered yet", retry_after_ms=1000)
        return table

    @property
    def ended(self) -> bool:
        """Whether every choice's ending has been read, and none of them was a failure."""
        return self._failure is None and all(choice.ended for choice in self.choices)

    async def changes(self) -> list[Change]:
        """What is new, at least one change, as soon as there is any; everything that piled up comes at once.

        Raises TokenloomError when a choice failed, after the tokens that came before; the others are cancelled then.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            found = [change for choice in self.choices if (change := choice.advance()) is not None]
            if found:
                self._note_first_token()
                self._failure = self._failure_in(found)
                if self._failure is None or any(change.token_ids for change in found):
                    return found
                continue
            if self._gave_up:
                raise error_of_cancel(self._interrupted.result())
            self._bell.clear()
            await self._bell.wait()

    def _note_first_token(self) -> None:
        if self._record.first_token_mono:
            return
        firsts = [choice.ticket.first_token_ns for choice in self.choices if choice.ticket.first_token_ns]
        if firsts:
            self._record.first_token_mono = min(firsts)
            self._mesh.metrics.time_to_first_token.observe(
                (min(firsts) - self._record.started_mono) / 1e9, self._record.exemplar(self._mesh.tracer)
            )

    def _failure_in(self, changes: list[Change]) -> TokenloomError | None:
        for change in changes:
            error = error_of_ending(change.ending) if change.ending is not None else None
            if error is not None:
                self.interrupt(CancelReason.CANCEL_REASON_SIBLING_FAILED)
                return self._located(error, change.index)
        return None

    def _located(self, error: TokenloomError, index: int) -> TokenloomError:
        """The scheduler knows tokens and constraints, not what the client called them: an error of size gets the name of what could be made
        smaller, one of the tools' common schema that of the tool.
        """
        attribute(error)
        if error.param is None and error.code in (ErrorCode.CANNOT_FIT, ErrorCode.PROMPT_TOO_LONG):
            sampling = self._wanted.sampling
            prompt = self._wanted.prompts[index // self._wanted.generated]
            error.param = prompt.param if sampling.max_tokens is None else sampling.max_tokens_param
        return error

    async def close(self) -> None:
        """Cancels what still runs, waits (boundedly) for how it ended, and gives everything back. A second call does nothing."""
        self.interrupt(CancelReason.CANCEL_REASON_SIBLING_FAILED)
        for lease in self._leases[len(self.choices) :]:
            lease.release()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOMBSTONE_PATIENCE):
                    await self._all_endings()
        finally:
            for timer in self._timers:
                timer.cancel()
            if self._visit is not None:
                tokens = count_tokens(self.choices)
                self._visit.settle(tokens.prompt + tokens.completion)
            self._mesh.closed(self)

    async def _all_endings(self) -> None:
        while any(choice.ticket.ending is None for choice in self.choices):
            self._bell.clear()
            await self._bell.wait()


def _text_of(sampling: SamplingParams, table: TextTable) -> IncrementalText:
    """The text of a choice. A stop string that stays in it is nothing to hold back."""
    stop = () if sampling.include_stop_in_output else sampling.stop
    return IncrementalText(table, stop, skip_special_tokens=not sampling.keep_special_tokens)
