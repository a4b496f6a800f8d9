"""Small random Llama checkpoints for tests: the files that transformers' save_pretrained writes, made with numpy in milliseconds.

The tokenizer is byte-level: ids 0 .. 2 are <|endoftext|>, <|im_start|> and <|im_end|>, 3 .. 258 the 256 bytes in order, then a few
merges. The model's logits are wider than its vocabulary, as in many real models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from libs.text.build import byte_level_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("Ġ", "the"), ("in", "g"), ("l", "l"))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_llama(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Fills `path` with a checkpoint; `overrides` replace keys of its config.json (num_hidden_layers=3, attention_bias=True ...)."""
    path.mkdir(parents=True, exist_ok=True)
    config = _config() | overrides
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 0]},
        "tokenizer.json": tiny_tokenizer_json(),
        "tokenizer_config.json": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    save_file(_weights(config, np.random.default_rng(seed)), path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_tokenizer_json() -> dict[str, Any]:
    """A byte-level tokenizer.json."""
    by_byte = {byte: character for character, byte in byte_level_alphabet().items()}
    tokens = [*SPECIAL_TOKENS, *(by_byte[byte] for byte in range(256)), *("".join(merge) for merge in MERGES)]
    specials = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(merge) for merge in MERGES],
        },
    }


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 272,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
    }


def _weights(config: dict[str, Any], random: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Scaled to keep activations near unit size, so that greedy choices are seldom close."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    attention, mlp = config["attention_bias"], config["mlp_bias"]
    layers = {
        "self_attn.q_proj": (queries, hidden, attention),
        "self_attn.k_proj": (keys, hidden, attention),
        "self_attn.v_proj": (keys, hidden, attention),
        "self_attn.o_proj": (hidden, queries, attention),
        "mlp.gate_proj": (inner, hidden, mlp),
        "mlp.up_proj": (inner, hidden, mlp),
        "mlp.down_proj": (hidden, inner, mlp),
    }
    weights = {"model.embed_tokens.weight": random.standard_normal((vocabulary, hidden)), "model.norm.weight": _gains(hidden, random)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random.standard_normal((vocabulary, hidden)) / np.sqrt(hidden) * 4
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in layers.items():
            weights[f"{prefix}{name}.weight"] = random.standard_normal((rows, columns)) / np.sqrt(columns) * 1.5
            if bias:
                weights[f"{prefix}{name}.bias"] = random.standard_normal(rows) * 0.2
        weights[f"{prefix}input_layernorm.weight"] = _gains(hidden, random)
        weights[f"{prefix}post_attention_layernorm.weight"] = _gains(hidden, random)
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in weights.items()}


def _gains(size: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    return 1.0 + 0.1 * random.standard_normal(size)
