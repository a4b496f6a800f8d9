from __future__ import annotations

from typing import Any

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.models.llama_config import LlamaConfig

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def refusal(changes: dict[str, Any]) -> TokenloomError:
    with pytest.raises(TokenloomError) as caught:
        LlamaConfig.from_json(CONFIG | changes)
    return caught.value


def test_what_is_left_out_has_the_values_of_the_first_llama():
    config = LlamaConfig.from_json(CONFIG)
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (16, 10000.0, 1e-6, 2048)
    assert not any((config.attention_bias, config.mlp_bias, config.tie_word_embeddings, config.rope_scaling))


def test_an_architecture_may_be_named_without_a_list():
    assert LlamaConfig.from_json(CONFIG | {"architectures": "LlamaForCausalLM"}).architectures == ("LlamaForCausalLM",)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size") for value in (0, -1)),
        {"max_position_embeddings": 0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": -2},
        {"head_dim": 17},
        {"head_dim": -16},
        {"rope_theta": -1},
        {"rope_parameters": "linear"},
        {"rope_parameters": LINEAR | {"factor": 0}},
        {"rope_scaling": {"type": "linear"}},
        {"vocab_size": None},
        {"hidden_size": "wide"},
    ],
)
def test_numbers_that_no_model_has_are_refused_before_anything_is_loaded(changes: dict[str, Any]):
    assert refusal(changes).code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": "Qwen2ForCausalLM"}, r"\(Qwen2ForCausalLM\)"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": "int4"}, "int4"),
        ({"rope_parameters": LINEAR | {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any], named: str):
    error = refusal(changes)
    assert error.code is ErrorCode.UNSUPPORTED
    with pytest.raises(TokenloomError, match=named):
        raise error
