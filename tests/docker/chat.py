"""A client of the deployment: what a stream said, and when each piece of it came."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import httpx

from tests.docker.deployment import MODEL


@dataclass(slots=True)
class Streamed:
    """A chat as it was streamed. `arrivals` are the times (monotonic seconds) at which the pieces of `text` came."""

    text: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    done: bool = False


def body(content: str, *, max_tokens: int, stream: bool) -> dict[str, object]:
    """A chat's request; greedy, and without an early end, so that its length is known."""
    message = {"role": "user", "content": content}
    return {"model": MODEL, "messages": [message], "max_tokens": max_tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def stream(url: str, content: str, *, max_tokens: int, begun: threading.Event | None = None) -> Streamed:
    """Streams one chat to its end; sets `begun` when its first words are there. Raises httpx.HTTPError when the stream breaks."""
    got = Streamed()
    request = body(content, max_tokens=max_tokens, stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=120, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                got.done = True
            elif line.startswith("data: "):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                got.finish_reason = choice["finish_reason"] or got.finish_reason
                if choice["delta"].get("content"):
                    got.text.append(choice["delta"]["content"])
                    got.arrivals.append(time.monotonic())
                    if begun is not None:
                        begun.set()
    return got


def ask(url: str, content: str, model: str = MODEL) -> int:
    """One short chat; returns its HTTP status."""
    request = body(content, max_tokens=1, stream=False) | {"model": model}
    return httpx.post(f"{url}/v1/chat/completions", json=request, timeout=120, trust_env=False).status_code
