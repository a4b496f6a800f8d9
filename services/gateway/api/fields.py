"""Which request fields have no effect here, and which ask for what is not built yet (docs/api.md lists both).

A field of REFUSED is accepted while its value asks for nothing; any other value is a 400 that says so. Fields in no list are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Neutral = Callable[[Any], bool]


def _one_of(*values: Any) -> Neutral:
    def neutral(value: Any) -> bool:
        # Booleans equal 0 and 1 in Python, not in JSON.
        return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values)

    return neutral


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


NO_EFFECT = frozenset(
    {
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "user",
    }
)

_EMPTY = _one_of([], {}, "")
_OFF = _one_of(False)
_NOTHING = _one_of()

REFUSED: Mapping[str, Neutral] = {
    "logprobs": _OFF,
    "top_logprobs": _one_of(0),
    "prompt_logprobs": _NOTHING,
    "echo": _OFF,
    "suffix": _EMPTY,
    "logit_bias": _EMPTY,
    "presence_penalty": _one_of(0),
    "frequency_penalty": _one_of(0),
    "repetition_penalty": _one_of(1),
    "length_penalty": _one_of(1),
    "use_beam_search": _OFF,
    "response_format": _text_format,
    "structured_outputs": _EMPTY,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "structural_tag": _NOTHING,
    "tools": _EMPTY,
    "tool_choice": _one_of("none", "auto"),
    "functions": _EMPTY,
    "function_call": _one_of("none", "auto"),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "truncate_prompt_tokens": _NOTHING,
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "lora_request": _NOTHING,
    "adapter": _EMPTY,
    "modalities": _one_of(["text"], []),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "verbosity": _one_of("medium"),
    "chat_template": _NOTHING,
    "documents": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    "return_tokens_as_token_ids": _OFF,
    "prompt_embeds": _NOTHING,
}

# Whether a prompt gets the tokenizer's special tokens is fixed: a completion's does, a chat's are in its template.
REFUSED_IN_CHATS: Mapping[str, Neutral] = {"add_special_tokens": _OFF}
REFUSED_IN_COMPLETIONS: Mapping[str, Neutral] = {"add_special_tokens": _one_of(True)}
