"""What is sent and when: the workloads by name, the requests' bodies, and the arrivals of an open loop."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prompts import PromptShape

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, and the load: `concurrency` requests always in flight (closed loop), or `rate` requests a second (open loop).

    Exactly one of `concurrency` and `rate` is set. `ignore_eos`: outputs are `output_len` long whatever the model would say.
    """

    shape: PromptShape
    output_len: int
    num_prompts: int
    ignore_eos: bool
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either a concurrency (closed loop) or a rate (open loop)")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError("the rate must be above 0 requests a second")
        numbers = {"input length": self.shape.input_len, "output length": self.output_len, "number of prompts": self.num_prompts}
        if self.concurrency is not None:
            numbers["concurrency"] = self.concurrency
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"the {name} must be at least 1, not {number}")
        if self.shape.prefix_len < 0:
            raise ValueError("the prefix length must not be negative")


NAMED = {
    "a": Workload(PromptShape(128), 128, num_prompts=4, ignore_eos=True, concurrency=1),
    "b": Workload(PromptShape(128), 128, num_prompts=16, ignore_eos=True, concurrency=8),
    "c": Workload(PromptShape(256), 64, num_prompts=64, ignore_eos=True, concurrency=32),
    "d": Workload(PromptShape(32, prefix_len=512), 32, num_prompts=32, ignore_eos=True, concurrency=8),
}


def request_body(endpoint: str, model: str, prompt: str | list[int], workload: Workload) -> bytes:
    """The JSON of one greedy, streamed request. Prompts of token ids are for completions only."""
    body: dict[str, object] = {"model": model}
    if endpoint == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body |= {"max_tokens": workload.output_len, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if workload.ignore_eos:  # not sent otherwise: it is no part of OpenAI's API, and some servers refuse it
        body["ignore_eos"] = True
    return json.dumps(body).encode()


def poisson_arrivals(rate: float, count: int, seed: int) -> Sequence[float]:
    """When each of `count` requests arrives, in seconds from the start: a Poisson process of `rate` a second; the first arrives at 0."""
    draw = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        arrivals.append(now)
        now += draw.expovariate(rate)
    return arrivals
