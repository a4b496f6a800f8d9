"""Sampling parameters as both ends speak them: validated by the gateway, carried by the scheduler, used by the worker."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a request stops; see common.v1.SamplingParams for units and what zero means.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `seed` is an unsigned 64-bit key.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def to_proto(self) -> common_pb2.SamplingParams:
        """As it travels."""
        return common_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            choice_index=self.choice_index,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """As it arrived."""
        return cls(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            seed=message.seed,
            choice_index=message.choice_index,
            ignore_eos=message.ignore_eos,
            stop_token_ids=tuple(message.stop_token_ids),
            stop=tuple(message.stop),
        )
