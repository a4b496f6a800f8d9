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


NO_EFFECT = frozenset(
    {
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "user",
    }
)

_EMPTY = _one_of([], {}, "")
_OFF = _one_of(False)
_NOTHING = _one_of()

REFUSED: Mapping[str, Neutral] = {
    "suffix": _EMPTY,
    "length_penalty": _one_of(1),
    "use_beam_search": _OFF,
    "early_stopping": _OFF,
    "guided_whitespace_pattern": _NOTHING,
    "functions": _EMPTY,
    "function_call": _one_of("none", "auto"),
    "spaces_between_special_tokens": _one_of(True),
    "truncation_side": _one_of("left"),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "thinking_token_budget": _one_of(-1),
    "repetition_detection": _EMPTY,
    "watermarking": _OFF,
    "lora_request": _NOTHING,
    "adapter": _EMPTY,
    "modalities": _one_of(["text"], []),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "verbosity": _one_of("medium"),
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "prompt_embeds": _NOTHING,
}

REFUSED_IN_CHATS: Mapping[str, Neutral] = {"echo": _OFF}
REFUSED_IN_COMPLETIONS: Mapping[str, Neutral] = {
    "top_logprobs": _one_of(0),
    "tools": _EMPTY,
    "tool_choice": _one_of("none", "auto"),
    "chat_template": _NOTHING,
    "continue_final_message": _OFF,
}

# What vLLM has renamed: both names work, the old one warns.
RENAMED: Mapping[str, str] = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "the server's --structured-outputs-config.backend",
    "structural_tag": "structured_outputs.structural_tag",
}
