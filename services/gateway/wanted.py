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

    `max_tokens_param` is the name under which max_tokens was given.
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

    def resolve(self, facts: scheduler_pb2.ModelFacts, prompt_tokens: int, drawn_seed: int, *, prompt_param: str) -> SamplingParams:
        """The parameters that run: the client's, else the model's generation_config, else the API's defaults.

        `prompt_param` is how the API names the prompt. Raises TokenloomError when prompt and output do not fit into the context, or
        stop_token_ids name no token.
        """
        defaults = facts.defaults
        room = facts.max_model_len - prompt_tokens
        max_tokens = self._max_tokens(facts, prompt_tokens, room, prompt_param)
        if self.min_tokens > max_tokens:
            raise _invalid(f"min_tokens ({self.min_tokens}) must not exceed {self.max_tokens_param} ({max_tokens})", "min_tokens")
        for token_id in self.stop_token_ids:
            if token_id >= facts.vocab_size:
                raise _invalid(f"stop_token_ids: {token_id} is not below the vocabulary size {facts.vocab_size}", "stop_token_ids")
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
        )

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
    name tokens "token_id:17". `tools` and `reasoning` (the name of a reasoning parser): what a chat's text is parsed for.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that has passed every check that needs no tokens and no mesh. `timeout` is in seconds; None: no limit.

    Every prompt gets `n` choices: choice c of prompt p has the index p * n + c. Lower `priority` runs first. `constraint`: what every
    choice keeps to.
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


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
