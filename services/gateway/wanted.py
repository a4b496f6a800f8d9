"""What a client wants, once its request has been understood: the hand-over from `api` to `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.sampling import SamplingParams
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2

_UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to be encoded. `estimate` is a guess of its tokens; `param` is how the API names it in errors."""

    request: tokenizer_pb2.EncodeRequest
    estimate: int
    param: str


@dataclass(frozen=True, slots=True)
class ClientSampling:
    """Sampling and stopping as the client gave them, checked; None is where it was silent. `top_k` 0 is off.

    `max_tokens_param` is the name under which max_tokens was given. `logprobs` and `prompt_logprobs` are what the response needs, be it to
    show them or to choose by them (best_of). `bad_words` are not here: the tokenizer spells them.
    """

    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra_args_json: bytes = b""

    def resolve(
        self,
        facts: scheduler_pb2.ModelFacts,
        prompt_tokens: int,
        drawn_seed: int,
        *,
        prompt_param: str,
        bad_words: tuple[tuple[int, ...], ...] = (),
        keep_special_tokens: bool = False,
    ) -> SamplingParams:
        """The parameters that run: the client's, else the model's generation_config, else the API's defaults.

        `prompt_param` is how the API names the prompt. Raises TokenloomError when prompt and output do not fit into the context.
        """
        defaults = facts.defaults
        room = facts.max_model_len - prompt_tokens
        max_tokens = self._max_tokens(facts, prompt_tokens, room, prompt_param)
        if self.min_tokens > max_tokens:
            raise _invalid(f"min_tokens ({self.min_tokens}) must not exceed {self.max_tokens_param} ({max_tokens})", "min_tokens")
        top_k = self.top_k if self.top_k is not None else (defaults.top_k if defaults.HasField("top_k") else 0)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature_for(facts),
            top_p=_first(self.top_p, defaults.top_p if defaults.HasField("top_p") else None, 1.0),
            top_k=min(top_k, facts.vocab_size),
            min_p=_first(self.min_p, defaults.min_p if defaults.HasField("min_p") else None, 0.0),
            seed=drawn_seed if self.seed is None else self.seed & _UINT64,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            repetition_penalty=_first(
                self.repetition_penalty, defaults.repetition_penalty if defaults.HasField("repetition_penalty") else None, 1.0
            ),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            bad_words=bad_words,
            allowed_token_ids=self.allowed_token_ids,
            include_stop_in_output=self.include_stop_in_output,
            keep_special_tokens=keep_special_tokens,
            extra_args_json=self.extra_args_json,
        )

    def check_ids(self, facts: scheduler_pb2.ModelFacts) -> None:
        """Raises TokenloomError INVALID_REQUEST where an id is no token of the model, naming the parameter."""
        biased = [token_id for token_id, _ in self.logit_bias]
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids), ("logit_bias", biased)):
            if ids and max(ids) >= facts.vocab_size:
                raise _invalid(f"{name}: {max(ids)} is not below the vocabulary size {facts.vocab_size}", name)

    def temperature_for(self, facts: scheduler_pb2.ModelFacts) -> float:
        """The temperature that runs; 0 is greedy."""
        defaults = facts.defaults
        return _first(self.temperature, defaults.temperature if defaults.HasField("temperature") else None, 1.0)

    def _max_tokens(self, facts: scheduler_pb2.ModelFacts, prompt_tokens: int, room: int, prompt_param: str) -> int:
        if room < 1:
            raise TokenloomError(
                ErrorCode.PROMPT_TOO_LONG,
                f"This model's maximum context length is {facts.max_model_len} tokens. However, your prompt has {prompt_tokens} tokens, "
                "which leaves no room for output. Please shorten it.",
                param=prompt_param,
            )
        if self.max_tokens is None:
            wish = facts.defaults.max_new_tokens
            return min(wish, room) if wish else room
        if self.max_tokens > room:
            raise TokenloomError(
                ErrorCode.PROMPT_TOO_LONG,
                f"This model's maximum context length is {facts.max_model_len} tokens. However, you requested "
                f"{prompt_tokens + self.max_tokens} tokens ({prompt_tokens} in the prompt, {self.max_tokens} for the output). "
                f"Please shorten the prompt or lower {self.max_tokens_param}.",
                param=self.max_tokens_param,
            )
        return self.max_tokens


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a chat may or must call. `format`: the parser of the model's own way to write calls; `mode` "required" and "named": the
    output is JSON under a constraint (a list of calls; one call's arguments) and is parsed as that. `names` are those of the tools.
    """

    mode: Literal["auto", "required", "named"]
    format: str
    names: tuple[str, ...]
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Shown:
    """How the response shows what was generated.

    `logprobs` and `prompt_logprobs`: alternatives to list beside each token, None for none at all. `echo`: a completion's text begins with
    its prompt; `echo_only`: and ends with it (max_tokens was 0; one token is generated and dropped). `tokens_as_ids`: log-probabilities
    name tokens "token_id:17". `tools` and `reasoning` (the name of a reasoning parser): what a chat's text is parsed for;
    `include_reasoning` False: the reasoning is found and left out. `logprobs_param`: the name of the number of alternatives.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    echo_only: bool = False
    tokens_as_ids: bool = False
    return_token_ids: bool = False
    keep_special_tokens: bool = False
    tools: ToolUse | None = None
    reasoning: str | None = None
    include_reasoning: bool = True
    logprobs_param: str = "logprobs"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that has passed every check that needs no tokens and no mesh. `timeout` is in seconds; None: no limit.

    Every prompt gets `n` choices: choice c of prompt p has the index p * n + c. With `best_of` so many are generated of each prompt, of
    which the response shows the `n` best. Lower `priority` runs first. `constraint`: what every choice keeps to; `constraint_backend`: what
    the client asks to have it compiled by, None: whatever does. `keep_last`: tokens that prompts are cut to from the left, 0: none; -1: to
    what fits.
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: ClientSampling
    n: int = 1
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timeout: float | None = None
    constraint: Constraint | None = None
    shown: Shown = Shown()
    best_of: int | None = None
    constraint_backend: str | None = None
    keep_last: int = 0

    @property
    def generated(self) -> int:
        """Choices that are generated of each prompt."""
        return self.n if self.best_of is None else self.best_of


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
