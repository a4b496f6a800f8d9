"""A scheduler and a tokenizer that speak the real contracts over real gRPC, and do what a test tells them."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from libs.blocks import block_hashes
from libs.errors import ErrorCode, TokenloomError
from libs.logprobs import PackedLogprobs
from libs.packing import count_ids, pack_ids, unpack_ids
from libs.rpc import Server, abort, listen, new_server
from libs.text.table import TextRule, TextTable, TokenClass
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

EOS = 256
VOCAB = 257
FINGERPRINT = "f" * 64

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
DEADLINE = common_pb2.FINISH_REASON_DEADLINE
FAILED = common_pb2.FINISH_REASON_FAILED


def byte_table(fingerprint: str = FINGERPRINT, *, verified: bool = True) -> TextTable:
    """Ids 0..255 are bytes, 256 is the end of sequence."""
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")
    classes = bytes(256) + bytes([TokenClass.SPECIAL])
    return TextTable(fingerprint, tokens, classes, TextRule.BYTE_LEVEL, verified=verified)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """One id per byte; a chat is its messages as `role:content` lines.

    `gate` holds calls back, `failure` fails them, `spell` gives the ids of a text.
    """

    def __init__(self, fingerprint: str = FINGERPRINT, *, verified: bool = True) -> None:
        self.table = byte_table(fingerprint, verified=verified)
        self.spell: Callable[[str], list[int]] = ids_of
        self.calls: list[tokenizer_pb2.EncodeRequest] = []
        self.traceparents: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.cancelled = 0
        self.failure: TokenloomError | None = None
        self.server: Server | None = None

    async def start(self, address: str) -> str:
        self.server = new_server(())
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self.server.server)
        return await listen(self.server, address)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def Encode(self, request, context):
        self.calls.append(request)
        self.traceparents.append(dict(context.invocation_metadata()).get("traceparent", ""))
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            await abort(context, self.failure)
        ids, param = _encode(request, self.spell), "messages" if request.HasField("chat") else "prompt"
        if not ids:
            await abort(context, TokenloomError(ErrorCode.EMPTY_PROMPT, "the prompt is empty", param=param))
        if request.max_tokens and len(ids) > request.max_tokens:
            message = f"the prompt has {len(ids)} tokens, more than the {request.max_tokens} allowed"
            await abort(context, TokenloomError(ErrorCode.PROMPT_TOO_LONG, message, param=param))
        hashes = b"".join(block_hashes(ids, request.hash_salt))
        tokens = [chr(token_id) for token_id in ids] if request.want_tokens else ()
        return tokenizer_pb2.EncodeResponse(
            token_ids=pack_ids(ids), block_hashes=hashes, tokenizer_fingerprint=self.table.fingerprint, tokens=tokens
        )

    async def Decode(self, request, context):
        ids = unpack_ids(request.token_ids)
        if max(ids, default=0) >= self.table.vocab_size:
            await abort(context, TokenloomError(ErrorCode.INVALID_REQUEST, f"token id {max(ids)} is out of range", param="prompt"))
        text = b"".join(self.table.tokens[token_id] for token_id in ids).decode(errors="replace")
        return tokenizer_pb2.DecodeResponse(text=text)

    async def Describe(self, request, context):
        if self.failure is not None and self.failure.code in (ErrorCode.UNAVAILABLE, ErrorCode.TOKENIZER_UNAVAILABLE):
            await abort(context, self.failure)
        return tokenizer_pb2.DescribeResponse(vocab_size=VOCAB)

    async def GetTextTable(self, request, context):
        return self.table.to_proto()


def _encode(request: tokenizer_pb2.EncodeRequest, spell: Callable[[str], list[int]]) -> list[int]:
    kind = request.WhichOneof("input")
    if kind == "text":
        return spell(request.text)
    if kind == "token_ids":
        return unpack_ids(request.token_ids.ids)
    return spell("".join(f"{message['role']}:{message['content']}\n" for message in json.loads(request.chat.messages_json)))


def scores(token_ids: Sequence[int], alternatives: int, *, is_prompt: bool = False) -> common_pb2.Logprobs:
    """Log-probabilities: each token the likeliest, its successors (by id) the next; the first of a prompt has none."""
    found = PackedLogprobs(alternatives)
    for place, token in enumerate(token_ids):
        top = [(token + step) % VOCAB for step in range(alternatives)]
        values = [-0.5 - step for step in range(alternatives)]
        undefined = is_prompt and not place
        found.token_ids += pack_ids([token, *top])
        found.values += struct.pack(f"<{alternatives + 1}f", *([math.nan] * (alternatives + 1) if undefined else [-0.5, *values]))
        found.ranks.append(0 if undefined else 1)
    return found.to_proto()


def facts(**changes) -> scheduler_pb2.ModelFacts:
    values = {
        "fingerprints": common_pb2.Fingerprints(model="m", tokenizer=FINGERPRINT, numerics="fake"),
        "max_model_len": 512,
        "vocab_size": VOCAB,
        "eos_token_ids": [EOS],
        "max_logprobs": 20,
        "constraint_backend": "llguidance",
        **changes,
    }
    return scheduler_pb2.ModelFacts(**values)


Behaviour = Callable[["FakeSession", scheduler_pb2.Submit], Awaitable[None]]


@dataclass(eq=False)
class FakeSession:
    """The scheduler's end of one session."""

    scheduler: FakeScheduler
    number: int
    hello: scheduler_pb2.SessionHello
    outbox: asyncio.Queue[scheduler_pb2.SchedulerFrame | None] = field(default_factory=asyncio.Queue)
    sent: dict[int, int] = field(default_factory=dict)
    submits: dict[int, scheduler_pb2.Submit] = field(default_factory=dict)

    def frame(self) -> scheduler_pb2.SchedulerFrame:
        return scheduler_pb2.SchedulerFrame(session=self.number, window=self.scheduler.window)

    def put(self, frame: scheduler_pb2.SchedulerFrame) -> None:
        self.outbox.put_nowait(frame)

    def emit(self, submit_id: int, tokens: list[int], *, first: int | None = None, ending: scheduler_pb2.Ending | None = None) -> None:
        """Tokens of one request, and its ending in the same frame."""
        self.put(self.delta(submit_id, tokens, first=first, ending=ending))

    def delta(
        self, submit_id: int, tokens: list[int], *, first: int | None = None, ending: scheduler_pb2.Ending | None = None
    ) -> scheduler_pb2.SchedulerFrame:
        frame = self.frame()
        start = self.sent.get(submit_id, 0) if first is None else first
        if tokens:
            frame.ids.append(submit_id)
            frame.first_indexes.append(start)
            frame.counts.append(len(tokens))
            frame.token_ids = pack_ids(tokens)
            self.sent[submit_id] = start + len(tokens)
            sampling = self.submits[submit_id].sampling if submit_id in self.submits else common_pb2.SamplingParams()
            if sampling.HasField("logprobs"):
                frame.logprobs.append(scores(tokens, sampling.logprobs))
        if ending is not None:
            frame.endings.append(ending)
        return frame

    def ending(self, submit_id: int, reason: int = STOP, **values) -> scheduler_pb2.Ending:
        submit = self.submits[submit_id]
        return scheduler_pb2.Ending(
            **{
                "id": submit_id,
                "attempt": submit.attempt,
                "reason": reason,
                "prompt_tokens": count_ids(submit.prompt_ids),
                "completion_tokens": self.sent.get(submit_id, 0),
                "was_accepted": True,
                **values,
            }
        )

    def close(self) -> None:
        """Ends the stream, as a scheduler that dies does."""
        self.outbox.put_nowait(None)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Accepts every submit and hands it to `behaviour`; cancels are answered with a CANCELLED ending unless `answers_cancels` is off.

    It speaks once a second even when nothing happens, unless it is `frozen`.
    """

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or say("hello")
        self.model: scheduler_pb2.ModelFacts | None = facts()
        self.window = scheduler_pb2.Window(max_outstanding=64, max_outstanding_tokens=1_000_000, ready=True)
        self.answers_cancels = True
        self.accepts_sessions = True
        self.frozen = False
        self.sessions: list[FakeSession] = []
        self.session_opened = asyncio.Event()
        self.submitted: asyncio.Queue[tuple[FakeSession, scheduler_pb2.Submit]] = asyncio.Queue()
        self.cancels: asyncio.Queue[scheduler_pb2.Cancel] = asyncio.Queue()
        self.server: Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> str:
        self.server = new_server(())
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self.server.server)
        return await listen(self.server, address)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.server is not None:
            await self.server.stop(0)

    @property
    def session(self) -> FakeSession:
        return self.sessions[-1]

    def set_window(self, **values) -> None:
        self.window = scheduler_pb2.Window(**values)
        self.session.put(self.session.frame())

    async def Session(self, request_iterator, context) -> AsyncIterator[scheduler_pb2.SchedulerFrame]:
        if not self.accepts_sessions:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        first = await anext(aiter(request_iterator))
        session = FakeSession(self, 1000 + len(self.sessions), first.hello)
        self.sessions.append(session)
        self.session_opened.set()
        welcome = session.frame()
        welcome.welcome.CopyFrom(scheduler_pb2.Welcome(protocol_version=1, leader_token=1, model=self.model))
        yield welcome
        tasks = [asyncio.create_task(self._read(session, request_iterator)), asyncio.create_task(self._beat(session))]
        try:
            while (frame := await session.outbox.get()) is not None:
                yield frame
        finally:
            for task in tasks:
                task.cancel()

    async def _beat(self, session: FakeSession) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self.frozen:
                session.put(session.frame())

    async def _read(self, session: FakeSession, frames: AsyncIterator[scheduler_pb2.GatewayFrame]) -> None:
        async for frame in frames:
            for submit in frame.submits:
                self._accept(session, submit)
            for cancel in frame.cancels:
                self.cancels.put_nowait(cancel)
                if self.answers_cancels and cancel.id in session.submits:
                    session.emit(cancel.id, [], ending=session.ending(cancel.id, CANCELLED, cancel_reason=cancel.reason))

    def _accept(self, session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        session.submits[submit.id] = submit
        session.sent[submit.id] = count_ids(submit.output_ids)
        accepted = session.frame()
        accepted.accepted.append(submit.id)
        if submit.sampling.HasField("prompt_logprobs"):
            positions = scores(unpack_ids(submit.prompt_ids), submit.sampling.prompt_logprobs, is_prompt=True)
            accepted.prompt_positions.add(id=submit.id, logprobs=positions)
        session.put(accepted)
        self.submitted.put_nowait((session, submit))
        task = asyncio.create_task(self.behaviour(session, submit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def say(text: str, *, reason: int = STOP, eos: bool = True, **ending) -> Behaviour:
    """Answers with `text`, a byte a frame, then the end of sequence together with the ending."""

    async def behaviour(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        known = count_ids(submit.output_ids)
        tokens = [*ids_of(text), *([EOS] if eos else [])]
        for index, token in enumerate(tokens[known:], known):
            end = None
            if index == len(tokens) - 1:
                session.sent[submit.id] = len(tokens)
                end = session.ending(submit.id, reason, **ending)
            session.emit(submit.id, [token], first=index, ending=end)

    return behaviour


async def silence(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
    """Accepts and says nothing: the test speaks itself."""


def refuse(error: TokenloomError) -> Behaviour:
    """Answers with a failure alone, before acceptance."""

    async def behaviour(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=error.to_proto(), was_accepted=False))

    return behaviour
