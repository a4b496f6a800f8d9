"""What /openapi.json says of the request's fields beyond their types: what each means, and which values the checks let pass.

The numbers are those that the checks use. A bound holds for the values it can be about: a minimum for numbers, minItems for arrays,
maxLength for texts. Where a check counts bytes of UTF-8, the schema, which counts characters, allows what the check may still refuse.
tests/integration/test_gateway_openapi.py sends each bound, and what lies beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.api import constraint_fields, message_fields, sampling_fields, validate
from services.gateway.parsers.planning import MAX_TOOLS


@dataclass(frozen=True, slots=True)
class Parameter:
    """`text` describes a field; `bounds` are JSON Schema's keywords about its value, `items` those about the entries of its array."""

    text: str
    bounds: Mapping[str, Any] = field(default_factory=dict)
    items: Mapping[str, Any] = field(default_factory=dict)


def _between(low: float, high: float) -> dict[str, Any]:
    return {"minimum": low, "maximum": high}


def _text(max_bytes: int) -> dict[str, Any]:
    return {"minLength": 1, "maxLength": max_bytes}


_INT64 = _between(-(2**63), 2**63 - 1)
_INT32 = _between(-(2**31), 2**31 - 1)
_TOKEN_ID = _between(0, 2**32 - 1)
_ALTERNATIVES = _between(0, 2**31 - 1)
_PENALTY = _between(-sampling_fields.MAX_PENALTY, sampling_fields.MAX_PENALTY)
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", **_TOKEN_ID}}
_PROMPTS = ({"type": "array", "minItems": 1, "items": {"type": "string"}}, _IDS, {"type": "array", "minItems": 1, "items": _IDS})
_XARG = {"type": ["string", "number"]}
_OLDER = "vLLM's older name of what is in `structured_outputs`."
_SPECIAL = "Whether the tokens that the tokenizer puts around a prompt are added."

_REQUEST: Mapping[str, Parameter] = {
    "model": Parameter("A served name. Absent: the first one."),
    "n": Parameter("Choices of each prompt. With temperature 0, where all would be equal, it must be 1. Absent: 1.", {"minimum": 1}),
    "best_of": Parameter(
        "At least `n`: so many are generated of each prompt, the `n` with the highest mean log-probability per token are shown.",
        {"minimum": 1},
    ),
    "max_tokens": Parameter("Tokens that are generated at most; prompt and output must fit into the context.", {"minimum": 1}),
    "min_tokens": Parameter("Until so many tokens, nothing ends the output. Absent: 0.", {"minimum": 0}),
    "temperature": Parameter("0 is greedy. Absent: the model's own, else 1.", _between(0, sampling_fields.MAX_TEMPERATURE)),
    "top_p": Parameter("Absent: the model's own, else 1.", {"exclusiveMinimum": 0, "maximum": 1}),
    "top_k": Parameter("-1 and 0: off. Absent: the model's own, else off.", {"minimum": -1}),
    "min_p": Parameter("Absent: the model's own, else 0.", _between(0, 1)),
    "seed": Parameter("The same seed gives the same tokens; choices of a prompt share it and differ. Absent: drawn at random.", _INT64),
    "stop": Parameter(
        "Texts that end the output.",
        {"maxItems": sampling_fields.MAX_STOPS, **_text(sampling_fields.MAX_STOP_BYTES)},
        _text(sampling_fields.MAX_STOP_BYTES),
    ),
    "stop_token_ids": Parameter("Tokens that end the output.", {"maxItems": sampling_fields.MAX_STOP_TOKEN_IDS}, _TOKEN_ID),
    "ignore_eos": Parameter("Whether the model's own end of sequence ends nothing."),
    "repetition_penalty": Parameter("Counts prompt and output. Absent: the model's own, else 1.", _between(1e-6, 1e6)),
    "presence_penalty": Parameter("Counts the output. Absent: 0.", _PENALTY),
    "frequency_penalty": Parameter("Counts the output. Absent: 0.", _PENALTY),
    "logit_bias": Parameter(
        "What is added to the logits of tokens, by their ids.",
        {
            "maxProperties": sampling_fields.MAX_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", **_between(-sampling_fields.MAX_BIAS, sampling_fields.MAX_BIAS)},
        },
    ),
    "bad_words": Parameter(
        "Texts that the output must not contain.", {"maxItems": sampling_fields.MAX_BAD_WORDS}, _text(sampling_fields.MAX_BAD_WORD_BYTES)
    ),
    "allowed_token_ids": Parameter("All other tokens are forbidden.", {"minItems": 1, "maxItems": sampling_fields.MAX_ALLOWED}, _TOKEN_ID),
    "include_stop_str_in_output": Parameter("Whether what stopped the output stays part of its text."),
    "skip_special_tokens": Parameter("False: special tokens are spelled. Absent: true."),
    "prompt_logprobs": Parameter(
        "Alternatives to list beside each token of the prompt; not streamed. Its KV is then not read from the cache.", _ALTERNATIVES
    ),
    "return_tokens_as_token_ids": Parameter("Log-probabilities name tokens `token_id:17`."),
    "truncate_prompt_tokens": Parameter(
        "Only the last so many tokens of each prompt are used; -1: as many as fit.", {**_between(-1, 2**31 - 1), "not": {"const": 0}}
    ),
    "add_special_tokens": Parameter(f"{_SPECIAL} Absent: true for a prompt, false for messages."),
    "vllm_xargs": Parameter(
        "What the operator's own logits processors are told.",
        {"additionalProperties": {"anyOf": [_XARG, {"type": "array", "items": _XARG}]}},
    ),
    "response_format": Parameter("What the output keeps to."),
    "structured_outputs": Parameter("What the output keeps to: exactly one kind."),
    "guided_json": Parameter(_OLDER),
    "guided_regex": Parameter(_OLDER, {"minLength": 1}),
    "guided_choice": Parameter(_OLDER, {"minItems": 1, "maxItems": constraint_fields.MAX_CHOICES}, {"minLength": 1}),
    "guided_grammar": Parameter(_OLDER, {"minLength": 1}),
    "guided_decoding_backend": Parameter("`auto`, or the backend that this server runs."),
    "structural_tag": Parameter(_OLDER),
    "stream": Parameter("Whether the answer comes as server-sent events."),
    "stream_options": Parameter("Only with `stream`."),
    "timeout": Parameter("Seconds until the request ends as a 504.", {"exclusiveMinimum": 0, "maximum": validate.MAX_TIMEOUT}),
    "return_token_ids": Parameter("Whether the response has the ids of prompt and output."),
    "cache_salt": Parameter(
        "The prefix cache is shared among requests of the same salt only. Absent: with all that give none.",
        _text(validate.MAX_CACHE_SALT_BYTES),
    ),
    "priority": Parameter("Lower runs first. Not 0 only where the server schedules by priority.", _INT32),
    "user": Parameter("Without effect."),
}

_TEMPLATE: Mapping[str, Parameter] = {
    "messages": Parameter("The chat so far.", {"minItems": 1}),
    "tools": Parameter("Functions that the model may call.", {"maxItems": MAX_TOOLS}),
    "add_generation_prompt": Parameter("Whether the template opens the assistant's turn. Absent: true."),
    "continue_final_message": Parameter("Whether the last message is left open and goes on; excludes add_generation_prompt."),
    "chat_template": Parameter(
        "A Jinja template of the client's own; refused unless the operator allows it.", {"maxLength": message_fields.MAX_TEMPLATE_BYTES}
    ),
    "chat_template_kwargs": Parameter("Further variables of the template.", {"not": {"required": ["chat_template"]}}),
}

_CHAT: Mapping[str, Parameter] = {
    **_TEMPLATE,
    "max_completion_tokens": Parameter("As max_tokens, and wins over it.", {"minimum": 1}),
    "logprobs": Parameter("Whether the log-probabilities of the output's tokens are listed."),
    "top_logprobs": Parameter("Alternatives to list beside each token; needs `logprobs`.", _ALTERNATIVES),
    "tool_choice": Parameter("Whether a tool may, must or must not be called, and which. Absent: `auto` where there are tools."),
    "parallel_tool_calls": Parameter("False: one call at most. Absent: true."),
    "documents": Parameter("The template's variable of that name."),
    "reasoning_effort": Parameter("The template's variable of that name; `none` also sets enable_thinking to false."),
    "include_reasoning": Parameter("False: reasoning is generated and left out. Absent: true."),
}

_COMPLETION: Mapping[str, Parameter] = {
    "prompt": Parameter("A text, texts, token ids, or lists of token ids.", {"anyOf": [{"type": "string"}, *_PROMPTS]}),
    "logprobs": Parameter("Alternatives to list beside each token; with `echo` beside those of the prompt too.", _ALTERNATIVES),
    "echo": Parameter("Whether the text begins with its prompt."),
    # With echo, 0 asks for the prompt alone.
    "max_tokens": Parameter("Tokens that are generated at most. 0 only with `echo`: the prompt alone. Absent: 16.", {"minimum": 0}),
}

_STRUCTURED: Mapping[str, Parameter] = {
    "json": Parameter("A JSON schema, or its text."),
    "regex": Parameter("The whole output matches it.", {"minLength": 1}),
    "choice": Parameter("The output is one of these.", {"minItems": 1, "maxItems": constraint_fields.MAX_CHOICES}, {"minLength": 1}),
    "grammar": Parameter("EBNF.", {"minLength": 1}),
    "json_object": Parameter("Any JSON object."),
    "structural_tag": Parameter("Text that is free but within tags: structures and triggers, or format; or its JSON text."),
    "disable_any_whitespace": Parameter("No blanks between JSON's tokens; else there are few."),
    "disable_additional_properties": Parameter("false: objects whose schema lists properties and says nothing of others may have others."),
    "whitespace_pattern": Parameter("Not served.", {"type": "null"}),
}

# The name of a struct -> its fields. Structs that are not here describe themselves.
PARAMETERS: Mapping[str, Mapping[str, Parameter]] = {
    "ChatRequest": {**_REQUEST, **_CHAT},
    "CompletionRequest": {**_REQUEST, **_COMPLETION},
    "StructuredOutputs": _STRUCTURED,
    "TokenizeRequest": {
        "model": _REQUEST["model"],
        "prompt": Parameter("A text; or give messages."),
        **_TEMPLATE,
        "add_special_tokens": _REQUEST["add_special_tokens"],
        "return_token_strs": Parameter("Whether the vocabulary's own names of the tokens are listed too."),
    },
    "DetokenizeRequest": {"model": _REQUEST["model"], "tokens": Parameter("Token ids.", {}, _TOKEN_ID)},
    "Message": {
        "role": Parameter("Whose message it is.", {"enum": sorted(message_fields.ROLES)}),
        "content": Parameter("A text, or its parts; absent where there are only tool calls."),
        "name": Parameter("Goes to the template."),
        "tool_calls": Parameter("The assistant's calls."),
        "tool_call_id": Parameter("The call that a tool's message answers."),
        "reasoning_content": Parameter("An earlier answer's reasoning."),
        "reasoning": Parameter("The same, under the name that newer versions of vLLM give it."),
    },
    "ContentPart": {
        "type": Parameter("What it is; this model reads text only.", {"enum": [*message_fields.TEXT_PARTS, "refusal"]}),
        "text": Parameter("The text of a part that is one."),
        "refusal": Parameter("An earlier answer's refusal."),
    },
}
