"""Sampling parameters as both ends speak them: validated by the gateway, carried by the scheduler, used by the worker."""

from __future__ import annotations

from dataclasses import dataclass

from libs.packing import pack_ids, unpack_ids
from tokenloom.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a request stops; see common.v1.SamplingParams for units and what zero means.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties' 0 are off. `seed` is an unsigned
    64-bit key. `logit_bias` holds pairs (id, what is added to its logit); `bad_words` sequences of ids; an empty `allowed_token_ids` allows
    all. `logprobs` and `prompt_logprobs`: alternatives beside the chosen token, None for no log-probabilities at all. `extra_args_json`: a
    JSON object for the operator's logits processors, or empty.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    keep_special_tokens: bool = False
    extra_args_json: bytes = b""

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
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias_ids=[token for token, _ in self.logit_bias],
            logit_bias_values=[value for _, value in self.logit_bias],
            bad_words=[pack_ids(word) for word in self.bad_words],
            allowed_token_ids=pack_ids(self.allowed_token_ids),
            include_stop_in_output=self.include_stop_in_output,
            keep_special_tokens=self.keep_special_tokens,
            extra_args_json=self.extra_args_json,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """As it arrived. Raises ValueError when its arrays contradict each other."""
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
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True)),
            bad_words=tuple(tuple(unpack_ids(word)) for word in message.bad_words),
            allowed_token_ids=tuple(unpack_ids(message.allowed_token_ids)),
            include_stop_in_output=message.include_stop_in_output,
            keep_special_tokens=message.keep_special_tokens,
            extra_args_json=message.extra_args_json,
        )
