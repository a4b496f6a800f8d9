"""Choices of a response without a mesh: tokens with their log-probabilities, handed over in any pieces, and what writers make of them."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from libs.logprobs import PackedLogprobs, TokenLogprobs
from libs.packing import pack_ids
from libs.sampling import SamplingParams
from libs.text.decoding import IncrementalText
from libs.text.stopping import StopMatcher
from libs.text.table import TextRule, TextTable, TokenClass
from services.gateway.api.writers import Form, Writer
from services.gateway.streamer import Choice, joined
from services.gateway.tickets import FinishReason, Ticket
from services.gateway.wanted import ClientSampling, Prompt, Shown, Wanted
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2

EOS = 256
_WORDS = ("<eos>", "hello", " wor", "ld", "\u20ac!", "STOP it", "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {')
VOCAB = 256 + len(_WORDS)


def word_table() -> TextTable:
    """Ids 0..255 are bytes, 256 is the (special) end of sequence, then some longer tokens."""
    tokens = (*(bytes([value]) for value in range(256)), *(word.encode() for word in _WORDS))
    classes = bytes(256) + bytes([TokenClass.SPECIAL]) + bytes(len(_WORDS) - 1)
    return TextTable("f" * 64, tokens, classes, TextRule.BYTE_LEVEL, verified=True)


TABLE = word_table()
_PLAIN = Shown()


def logprobs_of(token_ids: Iterable[int], alternatives: int) -> list[TokenLogprobs]:
    """A distribution for each token that depends on its id and place alone; some tokens are infinitely unlikely."""
    found = []
    for place, token_id in enumerate(token_ids):
        top = [(token_id + place + step) % VOCAB for step in range(alternatives)]
        values = [-0.25 * (step + 1) if step < 3 else -math.inf for step in range(alternatives)]
        rank = top.index(token_id) + 1 if token_id in top else VOCAB - token_id
        found.append(TokenLogprobs(token_id, -0.25 * rank if token_id != 7 else -math.inf, rank, top, values))
    return found


def packed(tokens: Sequence[TokenLogprobs], alternatives: int) -> PackedLogprobs:
    """As they travel. Values are float32 on the way: the tests' are exact in it."""
    kept = PackedLogprobs(alternatives)
    for token in tokens:
        kept.token_ids += pack_ids([token.token_id, *token.top_ids])
        kept.values += _floats([token.logprob, *token.top_logprobs])
        kept.ranks.append(token.rank)
    return kept


def _floats(values: list[float]) -> bytes:
    return array("f", values).tobytes()


@dataclass
class Told:
    """What is generated for one choice: `tokens`, the last of which ended it for `reason`, and what of the text is kept."""

    tokens: list[int]
    ending: scheduler_pb2.Ending
    logprobs: list[TokenLogprobs] | None = None


def told(
    tokens: Sequence[int], *, stop: Sequence[str] = (), include_stop: bool = False, keep_special: bool = False, logprobs: int | None = None
) -> Told:
    """Ends `tokens` as a scheduler does: at the first stop string or end of sequence, else for their length."""
    matcher, taken = StopMatcher(TABLE, stop, skip_special_tokens=not keep_special), []
    ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_LENGTH)
    for token_id in tokens:
        before = matcher.bytes_so_far
        taken.append(token_id)
        match = matcher.push(token_id)
        if token_id == EOS:
            ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_STOP, keep_bytes=before)
            break
        if match is not None:
            keep = match.keep_bytes + (len(match.stop.encode()) if include_stop else 0)
            ending = scheduler_pb2.Ending(reason=FinishReason.FINISH_REASON_STOP, keep_bytes=keep, stop_string=match.stop)
            break
    ending.completion_tokens, ending.prompt_tokens = len(taken), 3
    return Told(taken, ending, None if logprobs is None else logprobs_of(taken, logprobs))


@dataclass
class Response:
    """One request's choices. `prompt` is the text of each prompt, a byte a token."""

    wanted: Wanted
    choices: list[Choice] = field(default_factory=list)

    def form(self) -> Form:
        return Form(self.wanted, "id-1", 1, TABLE, self.choices)


def response_of(
    shown: Shown = _PLAIN,
    *,
    prompts: Sequence[str] = ("abc",),
    stop: tuple[str, ...] = (),
    n: int = 1,
    best_of: int | None = None,
    **wanted: Any,
) -> Response:
    """Choices that wait for their tokens; what is asked about their prompts is there."""
    asked = tuple(Prompt(tokenizer_pb2.EncodeRequest(text=text), 1, "prompt") for text in prompts)
    response = Response(Wanted("tiny", asked, ClientSampling(stop=stop), n=n, best_of=best_of, shown=shown, **wanted))
    scores = [asked for asked in (shown.prompt_logprobs, shown.logprobs if shown.echo else None) if asked is not None]
    sampling = SamplingParams(
        max_tokens=64,
        logprobs=0 if shown.logprobs is None and best_of is not None else shown.logprobs,
        prompt_logprobs=max(scores, default=None),
    )
    for prompt in prompts:
        first: Choice | None = None
        for number in range(response.wanted.generated):
            choice = _choice(response, prompt, replace(sampling, choice_index=number), first)
            first = first or choice
            response.choices.append(choice)
    return response


def _choice(response: Response, prompt: str, sampling: SamplingParams, first: Choice | None) -> Choice:
    ids, asked = list(prompt.encode()), sampling.prompt_logprobs if first is None else None
    submit = scheduler_pb2.Submit(id=1, prompt_ids=pack_ids(ids), sampling=replace(sampling, prompt_logprobs=asked).to_proto())
    ticket = Ticket(submit, asyncio.Event())
    if asked is not None:
        positions = logprobs_of(ids, asked)
        positions[0] = TokenLogprobs(ids[0], math.nan, 0, positions[0].top_ids, [math.nan] * asked)
        ticket.prompt_positions = packed(positions, asked)
    wanted = response.wanted
    text = IncrementalText(TABLE, wanted.sampling.stop, skip_special_tokens=not wanted.shown.keep_special_tokens)
    return Choice(len(response.choices), ticket, pack_ids(ids), text, first)


def hand_over(choice: Choice, said: Told, start: int, end: int) -> None:
    """Tokens `start` to `end` arrive, with the ending if they are the last."""
    choice.ticket.output += said.tokens[start:end]
    if choice.ticket.logprobs is not None:
        assert said.logprobs is not None
        choice.ticket.logprobs.extend(packed(said.logprobs[start:end], choice.ticket.logprobs.alternatives))
    if end >= len(said.tokens):
        choice.ticket.ending = said.ending


def whole(response: Response, writer: Writer, says: Sequence[Told]) -> dict[str, Any]:
    """The response that is not streamed, as a client reads it."""
    for choice, said in zip(response.choices, says, strict=True):
        hand_over(choice, said, 0, len(said.tokens))
    changes = []
    for choice in response.choices:
        change = choice.advance()
        assert change is not None
        changes.append(joined([change]))
    return read(writer.whole(changes))


def streamed(response: Response, writer: Writer, says: Sequence[Told], turns: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """The chunks of a stream in which (choice, number of its next tokens) arrive in `turns`, and the rest after them."""
    chunks = list(writer.opening())
    for number, size in [*turns, *((number, len(says[number].tokens) + 1) for number in range(len(says)))]:
        choice, said = response.choices[number], says[number]
        if choice.ended:
            continue
        start = len(choice.ticket.output)
        hand_over(choice, said, start, start + size)
        change = choice.advance()
        chunk = writer.chunk(change) if change is not None else None
        chunks += [chunk] if chunk is not None else []
    return [read(chunk) for chunk in [*chunks, writer.usage_chunk()]]


def read(body: Any) -> dict[str, Any]:
    """Strict JSON: no NaN, no infinity."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(body), parse_constant=_refuse)
    return found


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
