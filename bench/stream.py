"""One streamed request: sent, timed chunk by chunk, and ended as a success or as a failure of a kind."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from bench.http import ConnectError, DisconnectedError, MalformedError, Target, exchange
from bench.sse import EventReader

_ERROR_BODY_BYTES = 4096


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times in seconds on the clock of time.perf_counter.

    `due` is when it was to be sent: in an open loop the time of its arrival, even where the client came late. `chunk_times` are those of
    chunks that carried text. Tokens are from the server's usage, None where it sent none. `failure` is the kind, None for a success.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    failure: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to first token: from `due` to the first chunk with text, in seconds; None where no text came."""
        return self.chunk_times[0] - self.due if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None below two tokens or chunks."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the times between chunks with text, in seconds."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


class _ErrorEventError(Exception):
    """The stream carried an error instead of its rest."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Response:
    """Reads the body of one response into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._events = EventReader()
        self.head = b""
        self.finished = False

    def on_body(self, piece: bytes, now: float) -> None:
        """Takes the next bytes, which came at `now`."""
        if len(self.head) < _ERROR_BODY_BYTES:
            self.head += piece[:_ERROR_BODY_BYTES]
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.finished = True
            else:
                self._chunk(data, now)

    def _chunk(self, data: bytes, now: float) -> None:
        try:
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise _ErrorEventError(*_code_and_message(error))
            if usage := chunk.get("usage"):
                self._usage(usage)
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                    self._record.chunk_times.append(now)
                self.finished = self.finished or choice.get("finish_reason") is not None
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise MalformedError(f"{error!r} in {data[:200]!r}") from error

    def _usage(self, usage: dict[str, Any]) -> None:
        self._record.prompt_tokens = int(usage["prompt_tokens"])
        self._record.output_tokens = int(usage["completion_tokens"])
        self._record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _code_and_message(error: Any) -> tuple[str, str]:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unknown"), str(error.get("message"))
    return "unknown", str(error)


def _message(body: bytes) -> str:
    """The message of an error's body, or the beginning of the body where it has none."""
    try:
        return _code_and_message(json.loads(body)["error"])[1]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


async def stream_request(target: Target, path: str, headers: dict[str, str], body: bytes, record: RequestRecord, timeout: float) -> None:
    """Sends one request and fills `record`; every failure becomes a kind in it, none is raised.

    Kinds: connect, timeout (after `timeout` seconds), disconnected, truncated (the body ended without the stream's end), malformed,
    http_STATUS, error_CODE (an error inside the stream), no_text (it ended well, but nothing could be timed).
    """
    response = _Response(record)
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            status = await exchange(target, "POST", path, headers, body, response.on_body)
        _judge(record, response, status)
    except ConnectError as error:
        record.failure, record.detail = "connect", str(error)
    except TimeoutError:
        record.failure, record.detail = "timeout", f"no end after {timeout:g} s"
    except DisconnectedError as error:
        record.failure, record.detail = "disconnected", str(error)
    except MalformedError as error:
        record.failure, record.detail = "malformed", str(error)
    except _ErrorEventError as error:
        record.failure, record.detail = f"error_{error.code}", str(error)
    finally:
        record.ended = time.perf_counter()


def _judge(record: RequestRecord, response: _Response, status: int) -> None:
    if status != 200:
        record.failure, record.detail = f"http_{status}", _message(response.head)
    elif not response.finished:
        record.failure, record.detail = "truncated", "the body ended without [DONE] or a finish_reason"
    elif not record.chunk_times:
        record.failure, record.detail = "no_text", "no chunk carried text"
