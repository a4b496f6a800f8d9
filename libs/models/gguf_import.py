"""From one GGUF file to a model directory, once and without torch: config, tokenizer, template and defaults are read out of the
file; the weights stay in it, linked beside them. The worker dequantises them when it loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from libs.models.cache import link_or_copy
from libs.models.gguf_metadata import GGUFMetadata
from libs.models.gguf_tokenizer import token_text, tokenizer_json

# Part of the cache key: raise it when an import of the same file would come out differently.
IMPORT_VERSION = 1

# What every published model with Llama 3.1's scaling has in common.
_LOW_FREQUENCY, _HIGH_FREQUENCY, _ORIGINAL_LENGTH = 1.0, 4.0, 8192


def import_gguf(source: Path, target: Path, *, name: str) -> None:
    """Fills the empty directory `target`; the weights appear in it as `name`.gguf.

    Raises TokenloomError: UNSUPPORTED names an architecture, tokenizer or rope scaling not served, INVALID_REQUEST a broken file.
    """
    metadata = GGUFMetadata(source)
    config = llama_config(metadata)
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config},
    }
    for file_name, content in files.items():
        (target / file_name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    template = metadata.get("tokenizer.chat_template", str, None)
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    link_or_copy(source, target / f"{name}.gguf")


def llama_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """The Hugging Face config.json of a GGUF of the Llama architecture. Raises as import_gguf does."""
    _refuse_unsupported(metadata)
    heads = metadata.get("llama.attention.head_count", int)
    hidden = metadata.get("llama.embedding_length", int)
    head_dim = metadata.get("llama.attention.key_length", int, None) or hidden // heads
    rotated = metadata.get("llama.rope.dimension_count", int, None) or head_dim
    if rotated != head_dim:
        raise metadata.unsupported(f"rotary embeddings on {rotated} of {head_dim} dimensions of a head are not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": metadata.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", int, None) or heads,
        "head_dim": head_dim,
        "intermediate_size": metadata.get("llama.feed_forward_length", int),
        "vocab_size": metadata.tensor_shape("token_embd.weight")[0],
        "max_position_embeddings": metadata.get("llama.context_length", int),
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": metadata.get("llama.rope.freq_base", float, None) or 10000.0,
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }
    for key, stored in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{stored}_token_id", int, None)
        if token_id is not None:
            config[key] = token_id
    return config


def _refuse_unsupported(metadata: GGUFMetadata) -> None:
    architecture = metadata.get("general.architecture", str)
    if architecture != "llama":
        raise metadata.unsupported(f"architecture {architecture!r} is not supported; supported: llama")
    if metadata.get("llama.expert_count", int, 0):
        raise metadata.unsupported("mixtures of experts are not supported; supported: dense llama")
    if (metadata.get("split.count", int, 1) or 1) > 1:
        raise metadata.unsupported("it is one of several parts; merge them into one file first")


def _rope_scaling(metadata: GGUFMetadata, head_dim: int) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", str, None) or "none"
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.get("llama.rope.scaling.factor", float)}
    if kind != "none":
        raise metadata.unsupported(f"rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    return _llama3_scaling(metadata, head_dim) if metadata.has_tensor("rope_freqs.weight") else None


def _llama3_scaling(metadata: GGUFMetadata, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which a GGUF holds as a tensor of one divisor per frequency instead of its four parameters.

    All published models differ in `factor` alone, which is the largest divisor; that the others are the usual ones is checked.
    """
    divisors = metadata.float_tensor("rope_freqs.weight")
    theta = metadata.get("llama.rope.freq_base", float, None) or 10000.0
    factor = float(divisors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ratio = _ORIGINAL_LENGTH / wavelengths
    blend = np.clip((ratio - _LOW_FREQUENCY) / (_HIGH_FREQUENCY - _LOW_FREQUENCY), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise metadata.unsupported("its rope_freqs.weight is not the scaling of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQUENCY,
        "high_freq_factor": _HIGH_FREQUENCY,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    }


def _tokenizer_config(metadata: GGUFMetadata) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {name: token_text(metadata, stored) for name, stored in names.items()}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | {
        name: text for name, text in texts.items() if text is not None
    }
