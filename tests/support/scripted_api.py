"""An OpenAI-compatible server that answers what a test says: for the commands that are its clients, in their own process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

Script = Callable[[dict[str, Any]], httpx.Response]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}


class Stream(httpx.SyncByteStream):
    """Chunks of a body as they are taken; `closed` tells that the client has hung up."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts

    def close(self) -> None:
        self.closed = True


class ScriptedApi(httpx.MockTransport):
    """Serves models and, a script after the other, answers; the last one serves on. `bodies` are the requests' bodies."""

    def __init__(self, *scripts: Script, models: Iterable[str] = ("tiny", "other")) -> None:
        super().__init__(self._handle)
        self._scripts, self._models = list(scripts), list(models)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self._models]})
        self.bodies.append(json.loads(request.content))
        return (self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0])(self.bodies[-1])


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}], "usage": None})


def text(*pieces: str, finish_reason: str = "stop") -> list[bytes]:
    """A streamed chat answer."""
    contents = [delta(content=piece) for piece in pieces]
    return [
        delta(role="assistant", content=""),
        *contents,
        delta(finish_reason),
        event({"choices": [], "usage": USAGE}),
        b"data: [DONE]\n\n",
    ]


def streams(parts: Iterable[bytes]) -> Script:
    return lambda _body: httpx.Response(200, stream=Stream(parts))


def refuses(status: int, code: str, message: str, **headers: str) -> Script:
    error = {"error": {"message": message, "type": "t", "param": None, "code": code}}
    return lambda _body: httpx.Response(status, json=error, headers=headers)
