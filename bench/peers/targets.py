"""What the comparison is held against, as data, and the ratios that were reached: medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Metric = Callable[[str, str, int], float | None]
"""A figure of (server, load, round): None where that run does not exist or failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """`ours` over `peer` in one figure of one load. `least` must be reached, `goal` is aimed at; `rising`: more is better."""

    label: str
    ours: str
    peer: str
    load: str
    figure: str
    least: float
    goal: float | None = None
    rising: bool = True

    def is_met(self, ratio: float, bound: float) -> bool:
        """Whether a ratio is on the good side of the bound."""
        return ratio >= bound if self.rising else ratio <= bound


@dataclass(frozen=True, slots=True)
class Reached:
    """A target's ratio of medians, with the least and the most of the single rounds' ratios; `rounds` had both servers."""

    target: Target
    ratio: float | None
    low: float | None
    high: float | None
    rounds: int

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.ratio is None:
            return "not measured"
        if not self.target.is_met(self.ratio, self.target.least):
            return "NOT met"
        return "goal met" if self.target.goal is not None and self.target.is_met(self.ratio, self.target.goal) else "met"


_OUT, _TOTAL, _TTFT, _ITL99 = "output_tokens_per_s", "total_tokens_per_s", "ttft_p50", "itl_p99"
TARGETS = (
    Target("output tok/s, 1 stream", "tokenloom", "vllm", "a", _OUT, 1.5, 1.6),
    Target("output tok/s, 8 streams", "tokenloom", "vllm", "b", _OUT, 1.6, 2.0),
    Target("output tok/s, 32 streams", "tokenloom", "vllm", "c", _OUT, 1.2, 1.3),
    Target("output tok/s, shared prefix", "tokenloom", "vllm", "d", _OUT, 1.4, 1.6),
    Target("TTFT p50, 1 stream", "tokenloom", "vllm", "a", _TTFT, 0.9, 0.85, rising=False),
    Target("TTFT p50, 8 streams", "tokenloom", "vllm", "b", _TTFT, 0.8, 0.6, rising=False),
    Target("TTFT p50, 32 streams", "tokenloom", "vllm", "c", _TTFT, 1.0, rising=False),
    Target("ITL p99, 32 streams", "tokenloom", "vllm", "c", _ITL99, 0.3, 0.2, rising=False),
    Target("output tok/s, 1 stream", "tokenloom", "llamacpp", "a", _OUT, 1.2),
    Target("output tok/s, 8 streams", "tokenloom", "llamacpp", "b", _OUT, 1.5, 2.0),
    Target("output tok/s, 32 streams", "tokenloom", "llamacpp", "c", _OUT, 2.0),
    Target("output tok/s, 1 stream", "tokenloom-int8", "tokenloom", "a", _OUT, 2.5),
    Target("total tok/s, 32 streams", "tokenloom-int8", "tokenloom", "c", _TOTAL, 2.0),
    Target("output tok/s, 1 stream", "tokenloom-int8", "llamacpp-q8", "a", _OUT, 1.0),
    Target("output tok/s, 32 streams", "tokenloom-int8", "llamacpp-q8", "c", _OUT, 3.0),
)


def reached(target: Target, metric: Metric, rounds: Sequence[int]) -> Reached:
    """The ratio of the medians over those rounds in which both servers have the figure."""
    pairs = [(metric(target.ours, target.load, number), metric(target.peer, target.load, number)) for number in rounds]
    both = [(ours, peer) for ours, peer in pairs if ours is not None and peer]
    if not both:
        return Reached(target, None, None, None, 0)
    ratios = [ours / peer for ours, peer in both]
    middle = statistics.median(ours for ours, _ in both) / statistics.median(peer for _, peer in both)
    return Reached(target, middle, min(ratios), max(ratios), len(both))


def median(metric: Metric, server: str, load: str, rounds: Sequence[int]) -> float | None:
    """The median of a figure over the rounds that have it; None where none has."""
    found = [value for number in rounds if (value := metric(server, load, number)) is not None]
    return statistics.median(found) if found else None
